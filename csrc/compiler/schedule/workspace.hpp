// The shared memory that tasks of a GPU's plan have as workspace (kernels/cuda/loop/group.cuh).
//
// What shared memory leaves of an SM's 256 KB serves as first-level cache. A step that streams weights through
// registers is faster the less shared memory it takes (figures in docs/measurements.md); presumably loads in flight
// need space in that cache.
#pragma once

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// In bytes. Plans whose products and attention have few rows need little.
int workspace_bytes(const Plan& plan);

}  // namespace ark::compiler
