// Products on CPU tensors: PyTorch's product, then the group's collective from there to the result.
//
// The product is computed as a whole. Computing the parts for peers first would change the bits of torch.mm, because
// the library's blocks along the depth depend on the number of rows.
#include <algorithm>

#include "ops/matmul.hpp"

namespace ark::ops {

namespace {

// Runs one of the group's collectives under the operator's name.
void run(ProcessGroupArk& group, const MatmulCall& call, Kind kind, const at::Tensor& from, at::Tensor& to,
         int64_t elements) {
  const DType dtype = dtype_of(from.scalar_type());
  // A waiting operation keeps no tensors alive; these outlive it.
  group.run_fused(name_of(call.kind), to, fingerprint(call), [=, &to](Communicator& communicator, const Operation& op) {
    Operation mine = op;
    mine.descriptor.kind = kind;
    mine.descriptor.dtype = dtype;
    mine.descriptor.op = ReduceOp::sum;
    mine.descriptor.count = static_cast<uint64_t>(elements);
    const size_t count = static_cast<size_t>(elements), bytes = count * size_of(dtype);
    const int size = communicator.size();
    if (kind == Kind::all_reduce)
      communicator.all_reduce(mine, from.const_data_ptr(), to.mutable_data_ptr(), count);
    else if (kind == Kind::reduce_scatter)
      communicator.reduce_scatter(mine, split_evenly(from.const_data_ptr(), size, bytes).data(), to.mutable_data_ptr(),
                                  count);
    else
      communicator.all_gather(mine, from.const_data_ptr(), split_evenly(to.mutable_data_ptr(), size, bytes).data(),
                              bytes);
  });
}

}  // namespace

MatmulResult matmul_cpu(const MatmulCall& call, ProcessGroupArk& group) {
  const int64_t size = group.getSize();
  const auto none = [&] { return at::empty({0}, call.a.options()); };
  switch (call.kind) {
    case MatmulKind::all_reduce: {
      at::Tensor out = product_of(call.a, call);
      run(group, call, Kind::all_reduce, out, out, out.numel());
      return {out, none()};
    }
    case MatmulKind::reduce_scatter: {
      const at::Tensor product = product_of(call.a, call);
      at::Tensor out = at::empty({call.rows() / size, call.columns()}, call.a.options());
      run(group, call, Kind::reduce_scatter, product, out, out.numel());
      return {out, none()};
    }
    default: {
      at::Tensor gathered = at::empty({size * call.rows(), call.depth()}, call.a.options());
      const at::Tensor mine = call.a.contiguous();
      run(group, call, Kind::all_gather, mine, gathered, mine.numel());
      at::Tensor out = product_of(gathered, call);
      return {out, call.gathered ? gathered : none()};
    }
  }
}

}  // namespace ark::ops
