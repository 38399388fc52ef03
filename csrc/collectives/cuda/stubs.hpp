// The kernels' instantiations: stubs for KernelLibrary::get(), and the list that checks compile without a GPU.
#pragma once

#include <string>
#include <vector>

#include "collectives/dtype.hpp"

namespace ark {

// SUM and AVG of bfloat16, float16 and float32 have kernels of their own; everything else shares one that is told the
// dtype and the operation when it is launched. Complex numbers add as their scalars do.
enum class RuleKind : uint8_t { bf16, f16, f32, any };
inline constexpr int kRuleKinds = 4;
RuleKind rule_of(DType dtype, ReduceOp op);

// Entries "one_shot", "two_shot" and "add" for this place in a group of `ranks`.
std::string reduce_stub(RuleKind rule, int ranks, int rank);
// Entry "move".
std::string move_stub();
// Entry "bulk"; from compute capability 9.0.
std::string bulk_reduce_stub(RuleKind rule, int ranks);
std::string bulk_move_stub(int ranks);

struct Stub {
  std::string name;   // "probe"
  std::string text;   // what KernelLibrary::get() takes
  int min_arch = 80;  // 90: uses instructions of Hopper
};

// One instantiation of every kind of kernel.
std::vector<Stub> representative_stubs();

}  // namespace ark
