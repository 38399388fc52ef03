// all_reduce of sparse COO tensors. Every rank gathers all indices and values and adds them in rank order. 8- and
// 16-bit values are added in float32 and rounded once, as for dense tensors.
//
// The result replaces the tensor's indices and values. It is coalesced and has the union of all ranks' indices.
#include <algorithm>
#include <numeric>

#include <c10/core/GradMode.h>

#include "process_group/process_group_ark.hpp"

namespace ark {

namespace {

// All ranks' `rows` rows of `mine`, concatenated in rank order.
at::Tensor gather_rows(Communicator& group, const Operation& operation, const at::Tensor& mine,
                       const std::vector<int64_t>& rows) {
  auto shape = mine.sizes().vec();
  const int64_t most = *std::max_element(rows.begin(), rows.end());
  shape[0] = most;
  at::Tensor padded = at::zeros(shape, mine.options());
  padded.narrow(0, 0, mine.size(0)).copy_(mine);
  at::Tensor all = at::empty({group.size(), padded.numel()}, mine.options());
  Operation gather = operation;
  gather.descriptor.kind = Kind::all_gather;
  gather.descriptor.dtype = DType::raw8;
  gather.descriptor.count = padded.nbytes();
  const auto places = split_evenly(all.mutable_data_ptr(), group.size(), padded.nbytes());
  group.all_gather(gather, padded.const_data_ptr(), places.data(), padded.nbytes());
  std::vector<at::Tensor> parts;
  for (int r = 0; r < group.size(); ++r) parts.push_back(all[r].view(shape).narrow(0, 0, rows[r]));
  return at::cat(parts);
}

at::Tensor sum_rows(const at::Tensor& values, const at::Tensor& inverse, int64_t unique) {
  auto shape = values.sizes().vec();
  shape[0] = unique;
  const bool narrow = values.element_size() <= 2 && values.is_floating_point();
  at::Tensor sums = at::zeros(shape, values.options().dtype(narrow ? at::kFloat : values.scalar_type()));
  sums.index_add_(0, inverse, narrow ? values.to(at::kFloat) : values);  // one after the other, in rank order
  return sums;
}

}  // namespace

ProcessGroupArk::WorkPtr ProcessGroupArk::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return with_torch_errors([&]() -> WorkPtr {
    const CallSite here = site("all_reduce_sparse");
    check_count(here, "tensors", tensors.size(), 1, "one tensor a call");
    const at::Tensor& tensor = tensors[0];
    if (!tensor.is_sparse() || !(tensor.is_cpu() || tensor.is_cuda())) {
      refuse(here, ErrorKind::type_error, "tensor is not a sparse COO tensor on the CPU or a CUDA device",
             "Use all_reduce for others.");
    }
    if (tensor.is_cuda()) return all_reduce_sparse_cuda(tensor, options);
    const auto op = options.reduceOp.op_;
    if (op != c10d::ReduceOp::SUM && op != c10d::ReduceOp::AVG) {
      refuse(here, ErrorKind::type_error,
             std::string("op is ReduceOp.") +
                 name_of(reduction_of(options.reduceOp, tensor.scalar_type(), rank_, here.operation).op) +
                 ", and sparse tensors take ReduceOp.SUM and ReduceOp.AVG only",
             "Use one of these, or a dense tensor: an index that a rank lacks has no value for other operations.");
    }
    const Call call{.type = c10d::OpType::_ALLREDUCE_SPARSE,
                    .kind = Kind::all_reduce,
                    .name = here.operation,
                    .event = "allreduce",
                    .timeout = options.timeout,
                    .async = options.asyncOp,
                    .reduction = reduction_of(options.reduceOp, tensor.scalar_type(), rank_, here.operation),
                    .inputs = tensors,
                    .outputs = tensors,
                    .shape = shape_hash(static_cast<uint64_t>(tensor.sparse_dim()) + 2, tensor)};  // must always agree
    raise_version(tensor);  // not when it is written, which may be on another thread and after a backward began
    return issue(call, [target = tensor, op](Communicator& group, Operation& operation) {
      c10::NoGradGuard no_grad;
      const at::Tensor mine = target.coalesce();
      const int64_t own = mine._nnz();
      std::vector<int64_t> rows(group.size());
      std::vector<void*> places;
      for (int64_t& row : rows) places.push_back(&row);
      Operation sizes = operation;
      sizes.descriptor.kind = Kind::all_gather;
      group.all_gather(sizes, &own, places.data(), sizeof own);
      if (std::accumulate(rows.begin(), rows.end(), int64_t{0}) == 0) return;
      const at::Tensor indices = gather_rows(group, operation, mine._indices().t().contiguous(), rows);
      const at::Tensor values = gather_rows(group, operation, mine._values().contiguous(), rows);
      const auto [unique, inverse, counts] = at::unique_dim(indices, 0, /*sorted=*/true, /*return_inverse=*/true);
      at::Tensor sums = sum_rows(values, inverse, unique.size(0));
      if (op == c10d::ReduceOp::AVG) sums = sums.div(group.size());
      target.copy_(at::_sparse_coo_tensor_unsafe(unique.t().contiguous(), sums.to(values.scalar_type()), target.sizes(),
                                                 target.options())
                       ._coalesced_(true));
    });
  });
}

}  // namespace ark
