// The accesses for which the target's kernels can pass a policy to the caches. All others stay normal, so that explain
// never reports a policy that no load or store carries.
//
// On a GPU only 16-byte loads carry the policy of a matrix or of keys and values. Strides, offsets and depths decide
// where such loads are possible. Arguments are aligned to 16 bytes, or copied (Region::align).
#pragma once

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Whether the access is the matrix of a product of few rows, which is streamed. In a ProductsStage all matrices are or
// none is, as one kernel loads them.
bool is_streamed_matrix(const Plan& plan, const Stage& stage, const Access& access);
// Whether the access is the keys or values of attention with few queries. Either both are streamed or neither is.
bool is_streamed_state(const Plan& plan, const Stage& stage, const Access& access);
// Whether the value is in memory that readers poll, which gets no hint.
bool is_packets(const Plan& plan, int value);
// Whether the target's kernels can pass a policy for this access of a stage, or of a stage in its tail.
bool can_hint(const Plan& plan, const Stage& stage, const Access& access);

}  // namespace ark::compiler
