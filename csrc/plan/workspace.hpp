// How much shared memory the tasks of a GPU's plan have for themselves (kernels/cuda/loop/group.cuh).
//
// What shared memory leaves of an SM's 256 KB is its first-level cache, and loads that are under way take their place
// there: the less of shared memory a step takes that streams weights through registers, the faster it is. A decoding
// step of Llama-1B on an H200 takes 819 us with 50 KB of it in all, 829 with 110, 840 with 158 and 893 with 226.
#pragma once

#include "plan/plan.hpp"

namespace ark::plan {

// Bytes. A plan whose products and attention are of few rows needs little.
int workspace_bytes(const Plan& plan);

}  // namespace ark::plan
