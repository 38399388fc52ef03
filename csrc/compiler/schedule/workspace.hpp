// How much shared memory the tasks of a GPU's plan have for themselves (kernels/cuda/loop/group.cuh).
//
// What shared memory leaves of an SM's 256 KB is its first-level cache. The less of it a step takes that streams
// weights through registers, the faster it is: a decoding step of Llama-1B on an H200 takes 819 us with 50 KB of it in
// all, 829 with 110, 840 with 158 and 893 with 226. Supposedly loads that are under way take their place in that cache.
#pragma once

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Bytes. A plan whose products and attention are of few rows needs little.
int workspace_bytes(const Plan& plan);

}  // namespace ark::compiler
