// Matrix products with a collective: matmul_all_reduce, matmul_reduce_scatter, all_gather_matmul. PyTorch knows them as
// ark::* (registration.cpp); users call ark_torch.ops.
//
// A rank's product is rounded to the dtype; products are added in float32 in rank order and rounded once. Everything is
// checked before a byte moves, and all ranks must make the same call. On the CPU they compare every call. On GPUs they
// compare only the first call of a kind and shape, because otherwise the host could never run ahead of its device.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "ops/meeting.hpp"

namespace ark::ops {

// The forms of a call:
//   unfused  PyTorch's product, into registered memory if the group has any, then the group's collective: the bits of
//            torch.mm and the collective (matmul_cpu.cpp, matmul_cuda.cpp)
//   fused    one kernel: tiles leave for their rank once finished, or rows are multiplied as they arrive. It adds up a
//            product in its own order, the same in every run (matmul_fused.cpp; cuda/fused/matmul.cuh)
enum class MatmulKind : int { all_reduce, reduce_scatter, all_gather };
const char* name_of(MatmulKind kind);  // "matmul_all_reduce"

struct MatmulCall {
  MatmulKind kind;
  at::Tensor a, b;
  std::string group;
  std::string form;       // "auto", "unfused" (product first) or "fused" (one kernel)
  int64_t trained = 0;    // bit 0: a requires gradients; bit 1: b, or the bias of a reduce_scatter
  bool gathered = false;  // all_gather: also returns all ranks' a
  // Added to this rank's product, before it is rounded. Any of the ranks may have one.
  std::optional<at::Tensor> bias = std::nullopt;

  int64_t rows() const { return a.size(0); }
  int64_t depth() const { return a.size(1); }
  int64_t columns() const { return b.size(1); }
};

// The result, and for all_gather with `gathered` all ranks' a, else an empty tensor.
using MatmulResult = std::pair<at::Tensor, at::Tensor>;
MatmulResult matmul(const MatmulCall& call);

// The checked call in each form.
MatmulResult matmul_cpu(const MatmulCall& call, ProcessGroupArk& group);
MatmulResult matmul_cuda(const MatmulCall& call, ProcessGroupArk& group);

// This rank's product, into `out` if that is defined.
at::Tensor product_of(const at::Tensor& a, const MatmulCall& call, at::Tensor out = {});

// Runs one kernel, in a tile shape on which all ranks agree. Returns nothing on all ranks if ark does not carry the
// group's CUDA tensors or a device has no room.
std::optional<MatmulResult> matmul_fused(const MatmulCall& call, ProcessGroupArk& group);

// Why a single kernel cannot take the call, based on what all ranks share and on the device; empty if it can.
std::string why_not_fused(const MatmulCall& call, int ranks);
// Whether one kernel is expected to be faster, based only on what all ranks share; used by "auto".
bool prefers_fused(const MatmulCall& call, int ranks);

// Differs for calls that a launch must not confuse.
uint64_t fingerprint(const MatmulCall& call);

}  // namespace ark::ops
