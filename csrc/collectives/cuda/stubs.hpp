// The kernels' instantiations: stubs for KernelLibrary::get(), and lists that checks compile without a GPU.
#pragma once

#include <string>
#include <vector>

#include "collectives/cuda/cuda_dispatch.hpp"
#include "cuda/between.cuh"
#include "protocol/quantize.hpp"
#include "util/dtype.hpp"

namespace ark {

// SUM and AVG of bfloat16, float16 and float32 have their own kernels. All else shares one that takes dtype and
// operation at launch. Complex numbers add as scalars.
enum class RuleKind : uint8_t { bf16, f16, f32, any };
inline constexpr int kRuleKinds = 4;
RuleKind rule_of(DType dtype, ReduceOp op);

// The arguments of KernelLibrary::get() for a collective's kernel at this place in a group of `ranks`. Kernels that do
// not add are the same for every rule and place.
struct GroupStub {
  std::string text;
  const char* entry;
};
GroupStub group_stub(GroupKernel kernel, RuleKind rule, int ranks, int rank);
// An entry for elements of bf16, f16 or f32 and codes of a number of bits (0: exact): "compressed_encode",
// "compressed_reduce", each also as "_fed" with a residual, or "compressed_sum". Wide: one block per bucket instead of
// one warp.
struct CompressedKind {
  DType dtype;
  quantize::Format format;
  uint32_t bits;
  bool wide;
};
std::string compressed_stub(const CompressedKind& kind, const std::string& name);

// The kernels of cuda/between.cuh; those that add have one for each rule.
struct BetweenStub {
  std::string text;
  const char* entry;
};
BetweenStub between_stub(device::BetweenForm form, RuleKind rule);

// "peer_test", of cuda/peer_test.cuh.
std::string peer_test_stub();

struct Stub {
  std::string name;   // "probe"
  std::string text;   // argument of KernelLibrary::get()
  int min_arch = 80;  // 90: uses Hopper's instructions
};

// One instantiation of every kind of kernel.
std::vector<Stub> representative_stubs();
// Every instantiation for groups of these sizes, each once: what `make test-kernels` compiles and a wheel may ship.
std::vector<Stub> every_stub(const std::vector<int>& sizes);

}  // namespace ark
