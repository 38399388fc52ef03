// Unfused products on CUDA tensors: PyTorch's product straight into registered memory, if the group has any, then the
// group's collective to the result, without copies in between. matmul_fused.cpp uses a single kernel.
#include <c10/core/DeviceGuard.h>

#include "ops/matmul.hpp"
#include "process_group/cuda/cuda_group.hpp"
#include "process_group/work.hpp"

namespace ark::ops {

MatmulResult matmul_cuda(const MatmulCall& call, ProcessGroupArk& group) {
  const c10::Device device = call.a.device();
  const c10::OptionalDeviceGuard guard(device);
  const int64_t size = group.getSize();
  const bool capturing = is_capturing(device);
  // A graph's tensors come from its own pool.
  const auto place = [&](int64_t rows, int64_t columns) {
    const int64_t sizes[] = {rows, columns};
    at::Tensor made;
    if (!capturing) made = group.allocate_registered(sizes, call.a.scalar_type(), device);
    return made.defined() ? made : at::empty(sizes, call.a.options());
  };
  const auto none = [&] { return at::empty({0}, call.a.options()); };
  switch (call.kind) {
    case MatmulKind::all_reduce: {
      at::Tensor out = place(call.rows(), call.columns());
      product_of(call.a, call, out);
      Tensors tensors{out};
      c10d::AllreduceOptions options;
      options.asyncOp = false;
      wait_for(group.allreduce(tensors, options));
      return {out, none()};
    }
    case MatmulKind::reduce_scatter: {
      at::Tensor product = place(call.rows(), call.columns()), out = place(call.rows() / size, call.columns());
      product_of(call.a, call, product);
      c10d::ReduceScatterOptions options;
      options.asyncOp = false;
      wait_for(group._reduce_scatter_base(out, product, options));
      return {out, none()};
    }
    default: {
      at::Tensor gathered = place(size * call.rows(), call.depth()), mine = call.a.contiguous();
      c10d::AllgatherOptions options;
      options.asyncOp = false;
      wait_for(group._allgather_base(gathered, mine, options));
      at::Tensor out = product_of(gathered, call);
      return {out, call.gathered ? gathered : none()};
    }
  }
}

}  // namespace ark::ops
