// Products with a collective over a group's ranks: matmul_all_reduce, matmul_reduce_scatter, all_gather_matmul.
// Registered with PyTorch as ark::* (registration.cpp); what users call is ark_torch.ops.
//
// A rank's product is rounded to the dtype; products are added in float32 in rank order and rounded once. Forms:
//
//   unfused  PyTorch's own product, into registered memory where the group has any, and the group's collective from
//            there to the result: the bits of torch.mm and the collective (matmul_cpu.cpp, matmul_cuda.cpp)
//   fused    one kernel: tiles leave for their rank as they are finished, or rows are multiplied as they come; it adds
//            up a product in an order of its own, the same in every run (matmul_fused.cpp; cuda/fused/matmul.cuh)
//
// Everything is checked before a byte moves, and all ranks must mean the same product. On the CPU they tell each other
// in every call. On GPUs they do so before the first call of a kind and shape: a host that waited for others in each
// call would never be ahead of its device.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "ops/meeting.hpp"

namespace ark::ops {

enum class MatmulKind : int { all_reduce, reduce_scatter, all_gather };
const char* name_of(MatmulKind kind);  // "matmul_all_reduce"

struct MatmulCall {
  MatmulKind kind;
  at::Tensor a, b;
  std::string group;
  std::string form;       // "auto", "unfused" (product first) or "fused" (one kernel)
  int64_t trained = 0;    // bit 0: a takes gradients; bit 1: b
  bool gathered = false;  // all_gather: gives a of all ranks, too

  int64_t rows() const { return a.size(0); }
  int64_t depth() const { return a.size(1); }
  int64_t columns() const { return b.size(1); }
};

// The result; of all_gather with `gathered` also a of all ranks, else a tensor without elements.
using MatmulResult = std::pair<at::Tensor, at::Tensor>;
MatmulResult matmul(const MatmulCall& call);

// The checked call by each form.
MatmulResult matmul_cpu(const MatmulCall& call, ProcessGroupArk& group);
MatmulResult matmul_cuda(const MatmulCall& call, ProcessGroupArk& group);

// In one kernel, and in one shape of all that agree; none, alike on all ranks: something else than ark carries the
// group's CUDA tensors, or a device has no room.
std::optional<MatmulResult> matmul_fused(const MatmulCall& call, ProcessGroupArk& group);

// Why one kernel cannot take the call, from what all ranks share and from the device; empty: it can.
std::string why_not_fused(const MatmulCall& call, int ranks);
// Whether it is to be expected to be faster: what "auto" asks, from what all ranks share alone.
bool prefers_fused(const MatmulCall& call, int ranks);

// Different calls that a launch must not mistake for each other have different ones.
uint64_t fingerprint(const MatmulCall& call);

}  // namespace ark::ops
