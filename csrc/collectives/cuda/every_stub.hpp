// Every instantiation that a group may ask for: what `make test-kernels` compiles, and what a wheel may bring.
#pragma once

#include <vector>

#include "collectives/cuda/stubs.hpp"

namespace ark {

// For groups of these sizes, each stub once. A stub that a launcher names must be among them (tests/jit compares with
// representative_stubs()).
std::vector<Stub> every_stub(const std::vector<int>& sizes);

}  // namespace ark
