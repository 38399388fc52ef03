// Decides how many cases of a long test run: a part in the gate, all at night. For cases that only repeat a kind. Cases
// of a parametrized test that are for the night are instantiated under the prefix Night, which the gate leaves out.
#pragma once

#include <cstdlib>

namespace ark::test {

// All in `make test-cpp` and its parts (ARK_TEST_NIGHT), otherwise a quarter, at least one.
inline int cases(int all) {
  return std::getenv("ARK_TEST_NIGHT") != nullptr ? all : (all + 3) / 4;
}

}  // namespace ark::test
