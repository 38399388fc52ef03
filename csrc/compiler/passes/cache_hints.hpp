// Which accesses of a plan the target's kernels can tell caches about: what is not named here stays normal, so that
// explain names no policy that no load or store carries.
//
// On a GPU only loads of 16 bytes carry the policy of a matrix or of keys and values. Strides, offsets and depths say
// where there are such loads; that arguments begin at multiples of 16 bytes, as PyTorch allocates them, is assumed
// here, and checked at each launch.
#pragma once

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// The matrix of a product of few rows, which streams past them. Of products that share their rows (ProductsStage) all
// matrices are, or none: one kernel loads them.
bool is_streamed_matrix(const Plan& plan, const Stage& stage, const Access& access);
// Keys or values of attention of few queries: both of them are, or neither.
bool is_streamed_state(const Plan& plan, const Stage& stage, const Access& access);
// In memory that is polled: no hint.
bool is_packets(const Plan& plan, int value);
// Whether the target's kernels can tell caches what they do with this access of a stage or of one in its tail.
bool can_hint(const Plan& plan, const Stage& stage, const Access& access);

}  // namespace ark::compiler
