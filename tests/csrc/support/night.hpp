// How much of a long test runs: of the cases that only repeat a kind, a part in the gate and all at night.
#pragma once

#include <cstdlib>

namespace ark::test {

// `all` in `make test-cpp` and its parts (ARK_TEST_NIGHT), else a quarter, at least one.
inline int cases(int all) {
  return std::getenv("ARK_TEST_NIGHT") != nullptr ? all : (all + 3) / 4;
}

}  // namespace ark::test
