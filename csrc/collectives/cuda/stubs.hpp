// The kernels' instantiations: stubs for KernelLibrary::get(), and the lists that checks compile without a GPU.
#pragma once

#include <string>
#include <vector>

#include "collectives/cuda/cuda_dispatch.hpp"
#include "protocol/quantize.hpp"
#include "util/dtype.hpp"

namespace ark {

// SUM and AVG of bfloat16, float16 and float32 have kernels of their own; everything else shares one that is told the
// dtype and the operation when it is launched. Complex numbers add as their scalars do.
enum class RuleKind : uint8_t { bf16, f16, f32, any };
inline constexpr int kRuleKinds = 4;
RuleKind rule_of(DType dtype, ReduceOp op);

// What KernelLibrary::get() takes for a kernel of a group's collectives, for this place in a group of `ranks`. Kernels
// that do not add are the same for every rule and place.
struct GroupStub {
  std::string text;
  const char* entry;
};
GroupStub group_stub(GroupKernel kernel, RuleKind rule, int ranks, int rank);
// An entry for elements of bf16, f16 or f32 and codes of so many bits (0: exact): "compressed_encode" or
// "compressed_reduce", each also as "_fed", with a residual; or "compressed_sum". Wide: buckets that take a block, not
// a warp.
struct CompressedKind {
  DType dtype;
  quantize::Format format;
  uint32_t bits;
  bool wide;
};
std::string compressed_stub(const CompressedKind& kind, const std::string& name);

// "peer_test", of cuda/peer_test.cuh.
std::string peer_test_stub();

struct Stub {
  std::string name;   // "probe"
  std::string text;   // what KernelLibrary::get() takes
  int min_arch = 80;  // 90: uses instructions of Hopper
};

// One instantiation of every kind of kernel.
std::vector<Stub> representative_stubs();
// Every instantiation that groups of these sizes may ask for, each once: what `make test-kernels` compiles, and what a
// wheel may bring.
std::vector<Stub> every_stub(const std::vector<int>& sizes);

}  // namespace ark
