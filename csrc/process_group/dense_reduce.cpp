// all_reduce, reduce and reduce_scatter. Each method checks all arguments before any byte moves, describes the
// operation and passes it to the communicator.
#include <algorithm>

#include "process_group/process_group_ark.hpp"

namespace ark {

ProcessGroupArk::WorkPtr ProcessGroupArk::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return with_torch_errors([&]() -> WorkPtr {
    const CallSite here = site("all_reduce");
    if (tensors.size() == 1 && tensors[0].defined() && tensors[0].is_sparse())
      return allreduce_sparse(tensors, options);
    const at::Tensor& tensor = only(here, "tensor", tensors);
    const Call call{.type = c10d::OpType::ALLREDUCE,
                    .kind = Kind::all_reduce,
                    .name = here.operation,
                    .event = "allreduce",
                    .timeout = options.timeout,
                    .async = options.asyncOp,
                    .reduction = reduction_of(options.reduceOp, tensor.scalar_type(), rank_, here.operation),
                    .inputs = tensors,
                    .outputs = tensors,
                    .shape = debug_shape(tensor),
                    .carry = [&](c10d::Backend& carrier) { return carrier.allreduce(tensors, options); }};
    return issue(call, [target = Output(here, "tensor", tensor, Use::update), count = tensor.numel()](
                           Communicator& group, Operation& op) mutable {
      group.all_reduce(op, target.data(), target.data(), count);
      target.commit();
    });
  });
}

ProcessGroupArk::WorkPtr ProcessGroupArk::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("reduce");
    const at::Tensor& tensor = only(here, "tensor", tensors);
    check_rank(here, "dst", options.rootRank, size_);
    const Call call{.type = c10d::OpType::REDUCE,
                    .kind = Kind::reduce,
                    .name = here.operation,
                    .event = "reduce",
                    .timeout = options.timeout,
                    .async = options.asyncOp,
                    .root = options.rootRank,
                    .reduction = reduction_of(options.reduceOp, tensor.scalar_type(), rank_, here.operation),
                    .inputs = tensors,
                    .outputs = tensors,
                    .shape = debug_shape(tensor),
                    .carry = [&](c10d::Backend& carrier) { return carrier.reduce(tensors, options); }};
    const int64_t count = tensor.numel();
    if (options.rootRank == rank_) {
      return issue(call, [target = Output(here, "tensor", tensor, Use::update), count](Communicator& group,
                                                                                       Operation& op) mutable {
        group.reduce(op, target.data(), target.data(), count);
        target.commit();
      });
    }
    return issue(call, [source = Input(tensor), count](Communicator& group, Operation& op) {
      group.reduce(op, source.data(), nullptr, count);
    });
  });
}

ProcessGroupArk::WorkPtr ProcessGroupArk::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                         const c10d::ReduceScatterOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("reduce_scatter");
    const at::Tensor& output = only(here, "output", outputs);
    check_count(here, "input_list", inputs.size(), 1, "one list for the one output");
    const Tensors& parts = inputs[0];
    check_count(here, "input_list", parts.size(), size_, "one a rank");
    const Reduction reduction = reduction_of(options.reduceOp, output.scalar_type(), rank_, here.operation);
    std::vector<int64_t> counts;
    for (int r = 0; r < size_; ++r) {
      const std::string entry = entry_of("input_list", r);
      check_tensor(here, entry.c_str(), parts[r]);
      check_same_dtype(here, entry.c_str(), parts[r], "output", output);
      counts.push_back(parts[r].numel());
    }
    check_elements(here, "output", output.numel(), counts[rank_], "those of this rank's entry of input_list");
    const bool even = std::all_of(counts.begin(), counts.end(), [&](int64_t count) { return count == counts[0]; });
    const Call call{.type = c10d::OpType::REDUCE_SCATTER,
                    .kind = Kind::reduce_scatter,
                    .name = here.operation,
                    .event = "reduce_scatter",
                    .timeout = options.timeout,
                    .async = options.asyncOp,
                    .reduction = reduction,
                    .inputs = inputs,
                    .outputs = outputs,
                    .shape = even ? debug_shape(output) : 0,
                    .carry = [&](c10d::Backend& carrier) { return carrier.reduce_scatter(outputs, inputs, options); }};
    if (even) {
      return issue(call, [sources = inputs_of(parts), target = Output(here, "output", output), count = output.numel()](
                             Communicator& group, Operation& op) mutable {
        group.reduce_scatter(op, places_of(sources).data(), target.data(), count);
        target.commit();
      });
    }
    // Parts differ in size: one reduction to each rank in turn.
    return issue(call, [sources = inputs_of(parts), target = Output(here, "output", output),
                        counts = std::move(counts)](Communicator& group, Operation& op) mutable {
      op.descriptor.kind = Kind::reduce;
      for (size_t r = 0; r < counts.size(); ++r) {
        op.descriptor.root = static_cast<int32_t>(r);
        op.descriptor.count = counts[r];
        const bool mine = static_cast<int>(r) == group.rank();
        group.reduce(op, sources[r].data(), mine ? target.data() : nullptr, counts[r]);
      }
      target.commit();
    });
  });
}

ProcessGroupArk::WorkPtr ProcessGroupArk::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                               const c10d::ReduceScatterOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("reduce_scatter_tensor");
    check_tensor(here, "input", input);
    check_tensor(here, "output", output);
    check_same_dtype(here, "output", output, "input", input);
    check_elements(here, "input", input.numel(), output.numel() * size_, "those of output for every rank");
    const Call call{
        .type = c10d::OpType::_REDUCE_SCATTER_BASE,
        .kind = Kind::reduce_scatter,
        .name = here.operation,
        .event = "_reduce_scatter_base",
        .timeout = options.timeout,
        .async = options.asyncOp,
        .reduction = reduction_of(options.reduceOp, output.scalar_type(), rank_, here.operation),
        .inputs = input,
        .outputs = output,
        .shape = debug_shape(input),
        .carry = [&](c10d::Backend& carrier) { return carrier._reduce_scatter_base(output, input, options); }};
    return issue(call, [source = Input(input), target = Output(here, "output", output), count = output.numel(),
                        bytes = output.nbytes()](Communicator& group, Operation& op) mutable {
      group.reduce_scatter(op, split_evenly(source.data(), group.size(), bytes).data(), target.data(), count);
      target.commit();
    });
  });
}

}  // namespace ark
