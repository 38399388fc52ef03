// The dense collectives: check, describe, hand to the communicator. No byte moves before all checks have passed.
#include <cstring>

#include "process_group/process_group_ark.hpp"

namespace ark {

namespace {

using Tensors = ProcessGroupArk::Tensors;

// Pieces of one contiguous buffer, one a rank.
std::vector<const void*> split_evenly(const void* data, int size, size_t bytes) {
  std::vector<const void*> parts(size);
  for (int r = 0; r < size; ++r) parts[r] = static_cast<const std::byte*>(data) + r * bytes;
  return parts;
}
std::vector<void*> split_evenly(void* data, int size, size_t bytes) {
  std::vector<void*> parts(size);
  for (int r = 0; r < size; ++r) parts[r] = static_cast<std::byte*>(data) + r * bytes;
  return parts;
}

void check_list(const CallSite& site, const char* argument, const Tensors& list, int size, const char* like_argument,
                const at::Tensor& like) {
  check_count(site, argument, list.size(), size, "one a rank");
  for (size_t r = 0; r < list.size(); ++r) {
    const std::string entry = std::string(argument) + "[" + std::to_string(r) + "]";
    check_tensor(site, entry.c_str(), list[r]);
    check_same_dtype(site, entry.c_str(), list[r], like_argument, like);
    check_elements(site, entry.c_str(), list[r].numel(), like.numel(), std::string("as many as ") + like_argument);
  }
}

// Row sizes of an all_to_all over dimension 0, in elements.
std::vector<int64_t> split_sizes(const CallSite& site, const char* argument, const char* tensor_argument,
                                 const at::Tensor& tensor, const std::vector<int64_t>& splits, int size) {
  const int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
  const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  std::vector<int64_t> elements;
  if (splits.empty()) {
    if (rows % size != 0) {
      refuse(site, ErrorKind::invalid_argument,
             std::string(tensor_argument) + " has " + std::to_string(rows) + " rows, which " + std::to_string(size) +
                 " ranks do not share equally",
             std::string("Pass ") + argument + ", or a multiple of " + std::to_string(size) + " rows.");
    }
    elements.assign(size, rows / size * row);
    return elements;
  }
  check_count(site, argument, splits.size(), size, "one a rank");
  int64_t sum = 0;
  for (int64_t split : splits) {
    if (split < 0) {
      refuse(site, ErrorKind::invalid_argument, std::string(argument) + " holds " + std::to_string(split),
             "Splits are numbers of rows, zero or more.");
    }
    sum += split;
    elements.push_back(split * row);
  }
  if (sum != rows) {
    refuse(site, ErrorKind::invalid_argument,
           std::string(argument) + " adds up to " + std::to_string(sum) + ", but " + tensor_argument + " has " +
               std::to_string(rows) + " rows",
           "Make the splits add up to dimension 0.");
  }
  return elements;
}

}  // namespace

ProcessGroupArk::WorkPtr ProcessGroupArk::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return with_torch_errors([&]() -> WorkPtr {
    const CallSite here = site("all_reduce");
    if (tensors.size() == 1 && tensors[0].defined() && tensors[0].is_sparse())
      return allreduce_sparse(tensors, options);
    const at::Tensor& tensor = only(here, "tensor", tensors);
    const Reduction reduction = reduction_of(options.reduceOp, tensor.scalar_type(), rank_, here.operation);
    const int64_t count = tensor.numel();
    CommsRecord record(
        comms(),
        [&] {
          return CommsCall{.name = "allreduce",
                           .sequence = next_sequence(),
                           .rank = rank_,
                           .input_elements = count,
                           .output_elements = count,
                           .dtype = tensor.scalar_type(),
                           .async = options.asyncOp};
        },
        tensors, tensors);
    Call call{c10d::OpType::ALLREDUCE,
              Kind::all_reduce,
              here.operation,
              options.timeout,
              options.asyncOp,
              tensor.scalar_type(),
              -1,
              reduction,
              count,
              count,
              &tensors,
              &tensors};
    if (debug()) call.shape = shape_hash(1, tensor);
    return issue(
        call, tensors,
        [target = Output(here, "tensor", tensor, true), count](Communicator& group, Operation& operation) mutable {
          group.all_reduce(operation, target.data(), target.data(), count);
          target.commit();
        });
  });
}

ProcessGroupArk::WorkPtr ProcessGroupArk::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("reduce");
    const at::Tensor& tensor = only(here, "tensor", tensors);
    check_rank(here, "dst", options.rootRank, size_);
    const Reduction reduction = reduction_of(options.reduceOp, tensor.scalar_type(), rank_, here.operation);
    const int64_t count = tensor.numel();
    CommsRecord record(
        comms(),
        [&] {
          return CommsCall{.name = "reduce",
                           .sequence = next_sequence(),
                           .rank = static_cast<int>(options.rootRank),
                           .input_elements = count,
                           .output_elements = count,
                           .dtype = tensor.scalar_type(),
                           .async = options.asyncOp};
        },
        tensors, tensors);
    Call call{
        c10d::OpType::REDUCE, Kind::reduce, here.operation, options.timeout, options.asyncOp, tensor.scalar_type(),
        options.rootRank,     reduction,    count,          count,           &tensors,        &tensors};
    if (debug()) call.shape = shape_hash(1, tensor);
    const bool root = options.rootRank == rank_;
    if (root) {
      return issue(call, tensors,
                   [target = Output(here, "tensor", tensor, true), count](Communicator& group, Operation& op) mutable {
                     group.reduce(op, target.data(), target.data(), count);
                     target.commit();
                   });
    }
    return issue(call, tensors, [source = Input(tensor), count](Communicator& group, Operation& op) {
      group.reduce(op, source.data(), nullptr, count);
    });
  });
}

ProcessGroupArk::WorkPtr ProcessGroupArk::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("broadcast");
    const at::Tensor& tensor = only(here, "tensor", tensors);
    check_rank(here, "src", options.rootRank, size_);
    const int64_t count = tensor.numel();
    CommsRecord record(
        comms(),
        [&] {
          return CommsCall{.name = "broadcast",
                           .sequence = next_sequence(),
                           .rank = static_cast<int>(options.rootRank),
                           .input_elements = count,
                           .output_elements = count,
                           .dtype = tensor.scalar_type(),
                           .async = options.asyncOp};
        },
        tensors, tensors);
    Call call{c10d::OpType::BROADCAST,
              Kind::broadcast,
              here.operation,
              options.timeout,
              options.asyncOp,
              tensor.scalar_type(),
              options.rootRank,
              {},
              count,
              count,
              &tensors,
              &tensors};
    if (debug()) call.shape = shape_hash(1, tensor);
    const bool root = options.rootRank == rank_;
    return issue(call, tensors,
                 [target = Output(here, "tensor", tensor, root), bytes = tensor.nbytes(), root](Communicator& group,
                                                                                                Operation& op) mutable {
                   group.broadcast(op, target.data(), bytes);
                   if (!root) target.commit();
                 });
  });
}

ProcessGroupArk::WorkPtr ProcessGroupArk::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("all_gather");
    const at::Tensor& input = only(here, "tensor", inputs);
    check_count(here, "tensor_list", outputs.size(), 1, "one list for the one input");
    check_list(here, "tensor_list", outputs[0], size_, "tensor", input);
    CommsRecord record(
        comms(),
        [&] {
          return CommsCall{.name = "all_gather",
                           .sequence = next_sequence(),
                           .rank = rank_,
                           .input_elements = input.numel(),
                           .output_elements = input.numel() * size_,
                           .dtype = input.scalar_type(),
                           .async = options.asyncOp};
        },
        inputs, outputs);
    Call call{c10d::OpType::ALLGATHER,
              Kind::all_gather,
              here.operation,
              options.timeout,
              options.asyncOp,
              input.scalar_type(),
              -1,
              {},
              input.numel(),
              input.numel() * size_,
              &inputs,
              &outputs[0]};
    if (debug()) call.shape = shape_hash(1, input);
    return issue(call, outputs[0],
                 [source = Input(input), targets = outputs_of(here, "tensor_list", outputs[0]), bytes = input.nbytes()](
                     Communicator& group, Operation& op) mutable {
                   std::vector<void*> places;
                   for (Output& target : targets) places.push_back(target.data());
                   group.all_gather(op, source.data(), places.data(), bytes);
                   for (Output& target : targets) target.commit();
                 });
  });
}

ProcessGroupArk::WorkPtr ProcessGroupArk::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                          const c10d::AllgatherOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("all_gather_into_tensor");
    check_tensor(here, "input_tensor", input);
    check_tensor(here, "output_tensor", output);
    check_same_dtype(here, "output_tensor", output, "input_tensor", input);
    check_elements(here, "output_tensor", output.numel(), input.numel() * size_,
                   "those of input_tensor for every rank");
    CommsRecord record(
        comms(),
        [&] {
          return CommsCall{.name = "_allgather_base",
                           .sequence = next_sequence(),
                           .rank = rank_,
                           .input_elements = input.numel(),
                           .output_elements = output.numel(),
                           .dtype = input.scalar_type(),
                           .async = options.asyncOp};
        },
        input, output);
    const Tensors ins{input}, outs{output};
    Call call{c10d::OpType::_ALLGATHER_BASE,
              Kind::all_gather,
              here.operation,
              options.timeout,
              options.asyncOp,
              input.scalar_type(),
              -1,
              {},
              input.numel(),
              output.numel(),
              &ins,
              &outs};
    if (debug()) call.shape = shape_hash(1, input);
    return issue(call, outs,
                 [source = Input(input), target = Output(here, "output_tensor", output), bytes = input.nbytes(),
                  size = size_](Communicator& group, Operation& op) mutable {
                   group.all_gather(op, source.data(), split_evenly(target.data(), size, bytes).data(), bytes);
                   target.commit();
                 });
  });
}

ProcessGroupArk::WorkPtr ProcessGroupArk::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                 const c10d::GatherOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("gather");
    const at::Tensor& input = only(here, "tensor", inputs);
    check_rank(here, "dst", options.rootRank, size_);
    const bool root = options.rootRank == rank_;
    Tensors targets;
    if (root) {
      check_count(here, "gather_list", outputs.size(), 1, "one list for the one input");
      check_list(here, "gather_list", outputs[0], size_, "tensor", input);
      targets = outputs[0];
    } else if (!outputs.empty() && !(outputs.size() == 1 && outputs[0].empty())) {
      refuse(here, ErrorKind::invalid_argument,
             "gather_list is given on rank " + std::to_string(rank_) + ", which is not the destination (" +
                 std::to_string(options.rootRank) + ")",
             "Pass it on the destination only.");
    }
    CommsRecord record(
        comms(),
        [&] {
          return CommsCall{.name = "gather",
                           .sequence = next_sequence(),
                           .rank = static_cast<int>(options.rootRank),
                           .input_elements = input.numel(),
                           .output_elements = input.numel() * size_,
                           .dtype = input.scalar_type(),
                           .async = options.asyncOp};
        },
        inputs, outputs);
    Call call{c10d::OpType::GATHER,
              Kind::gather,
              here.operation,
              options.timeout,
              options.asyncOp,
              input.scalar_type(),
              options.rootRank,
              {},
              input.numel(),
              root ? input.numel() * size_ : 0,
              &inputs,
              &targets};
    if (debug()) call.shape = shape_hash(1, input);
    return issue(call, targets,
                 [source = Input(input), places = outputs_of(here, "gather_list", targets), bytes = input.nbytes()](
                     Communicator& group, Operation& op) mutable {
                   std::vector<void*> pointers;
                   for (Output& place : places) pointers.push_back(place.data());
                   group.gather(op, source.data(), pointers.data(), bytes);
                   for (Output& place : places) place.commit();
                 });
  });
}

ProcessGroupArk::WorkPtr ProcessGroupArk::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                  const c10d::ScatterOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("scatter");
    const at::Tensor& output = only(here, "tensor", outputs);
    check_rank(here, "src", options.rootRank, size_);
    const bool root = options.rootRank == rank_;
    Tensors sources;
    if (root) {
      check_count(here, "scatter_list", inputs.size(), 1, "one list for the one output");
      check_list(here, "scatter_list", inputs[0], size_, "tensor", output);
      sources = inputs[0];
    } else if (!inputs.empty() && !(inputs.size() == 1 && inputs[0].empty())) {
      refuse(here, ErrorKind::invalid_argument,
             "scatter_list is given on rank " + std::to_string(rank_) + ", which is not the source (" +
                 std::to_string(options.rootRank) + ")",
             "Pass it on the source only.");
    }
    CommsRecord record(
        comms(),
        [&] {
          return CommsCall{.name = "scatter",
                           .sequence = next_sequence(),
                           .rank = static_cast<int>(options.rootRank),
                           .input_elements = output.numel() * size_,
                           .output_elements = output.numel(),
                           .dtype = output.scalar_type(),
                           .async = options.asyncOp};
        },
        inputs, outputs);
    Call call{c10d::OpType::SCATTER,
              Kind::scatter,
              here.operation,
              options.timeout,
              options.asyncOp,
              output.scalar_type(),
              options.rootRank,
              {},
              root ? output.numel() * size_ : 0,
              output.numel(),
              &sources,
              &outputs};
    if (debug()) call.shape = shape_hash(1, output);
    return issue(call, outputs,
                 [places = inputs_of(sources), target = Output(here, "tensor", output), bytes = output.nbytes()](
                     Communicator& group, Operation& op) mutable {
                   std::vector<const void*> pointers;
                   for (const Input& place : places) pointers.push_back(place.data());
                   group.scatter(op, pointers.data(), target.data(), bytes);
                   target.commit();
                 });
  });
}

ProcessGroupArk::WorkPtr ProcessGroupArk::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                         const c10d::ReduceScatterOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("reduce_scatter");
    const at::Tensor& output = only(here, "output", outputs);
    check_count(here, "input_list", inputs.size(), 1, "one list for the one output");
    check_count(here, "input_list", inputs[0].size(), size_, "one a rank");
    const Reduction reduction = reduction_of(options.reduceOp, output.scalar_type(), rank_, here.operation);
    int64_t largest = 0;
    for (int r = 0; r < size_; ++r) {
      const std::string entry = "input_list[" + std::to_string(r) + "]";
      check_tensor(here, entry.c_str(), inputs[0][r]);
      check_same_dtype(here, entry.c_str(), inputs[0][r], "output", output);
      largest = std::max(largest, inputs[0][r].numel());
    }
    check_elements(here, "output", output.numel(), inputs[0][rank_].numel(),
                   "those of this rank's entry of input_list");
    bool even = true;
    for (const at::Tensor& part : inputs[0]) even &= part.numel() == largest;
    CommsRecord record(
        comms(),
        [&] {
          return CommsCall{.name = "reduce_scatter",
                           .sequence = next_sequence(),
                           .rank = rank_,
                           .input_elements = elements_of(inputs[0]),
                           .output_elements = output.numel(),
                           .dtype = output.scalar_type(),
                           .async = options.asyncOp};
        },
        inputs, outputs);
    Call call{c10d::OpType::REDUCE_SCATTER,
              Kind::reduce_scatter,
              here.operation,
              options.timeout,
              options.asyncOp,
              output.scalar_type(),
              -1,
              reduction,
              elements_of(inputs[0]),
              output.numel(),
              &inputs[0],
              &outputs};
    if (even) {
      if (debug()) call.shape = shape_hash(1, output);
      return issue(call, outputs,
                   [sources = inputs_of(inputs[0]), target = Output(here, "output", output), count = output.numel()](
                       Communicator& group, Operation& op) mutable {
                     std::vector<const void*> pointers;
                     for (const Input& source : sources) pointers.push_back(source.data());
                     group.reduce_scatter(op, pointers.data(), target.data(), count);
                     target.commit();
                   });
    }
    // Parts of different sizes: one reduction to each rank in turn.
    std::vector<int64_t> counts;
    for (const at::Tensor& part : inputs[0]) counts.push_back(part.numel());
    return issue(call, outputs,
                 [sources = inputs_of(inputs[0]), target = Output(here, "output", output), counts](
                     Communicator& group, Operation& op) mutable {
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
    const Reduction reduction = reduction_of(options.reduceOp, output.scalar_type(), rank_, here.operation);
    CommsRecord record(
        comms(),
        [&] {
          return CommsCall{.name = "_reduce_scatter_base",
                           .sequence = next_sequence(),
                           .rank = rank_,
                           .input_elements = input.numel(),
                           .output_elements = output.numel(),
                           .dtype = input.scalar_type(),
                           .async = options.asyncOp};
        },
        input, output);
    const Tensors ins{input}, outs{output};
    Call call{c10d::OpType::_REDUCE_SCATTER_BASE,
              Kind::reduce_scatter,
              here.operation,
              options.timeout,
              options.asyncOp,
              output.scalar_type(),
              -1,
              reduction,
              input.numel(),
              output.numel(),
              &ins,
              &outs};
    if (debug()) call.shape = shape_hash(1, input);
    return issue(call, outs,
                 [source = Input(input), target = Output(here, "output", output), count = output.numel(),
                  bytes = output.nbytes(), size = size_](Communicator& group, Operation& op) mutable {
                   group.reduce_scatter(op, split_evenly(source.data(), size, bytes).data(), target.data(), count);
                   target.commit();
                 });
  });
}

ProcessGroupArk::WorkPtr ProcessGroupArk::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                        std::vector<int64_t>& output_splits,
                                                        std::vector<int64_t>& input_splits,
                                                        const c10d::AllToAllOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("all_to_all_single");
    check_tensor(here, "input", input);
    check_tensor(here, "output", output);
    check_same_dtype(here, "output", output, "input", input);
    const auto sends = split_sizes(here, "input_split_sizes", "input", input, input_splits, size_);
    const auto receives = split_sizes(here, "output_split_sizes", "output", output, output_splits, size_);
    check_elements(here, "output_split_sizes[rank]", receives[rank_], sends[rank_], "what this rank keeps for itself");
    const bool uneven = !input_splits.empty() || !output_splits.empty();
    CommsRecord record(
        comms(),
        [&] {
          return CommsCall{.name = uneven ? "all_to_allv" : "all_to_all",
                           .sequence = next_sequence(),
                           .rank = rank_,
                           .input_elements = input.numel(),
                           .output_elements = output.numel(),
                           .dtype = input.scalar_type(),
                           .input_splits = &input_splits,
                           .output_splits = &output_splits,
                           .async = options.asyncOp};
        },
        input, output);
    const Tensors ins{input}, outs{output};
    const Call call{c10d::OpType::ALLTOALL_BASE,
                    Kind::all_to_all,
                    here.operation,
                    options.timeout,
                    options.asyncOp,
                    input.scalar_type(),
                    -1,
                    {},
                    input.numel(),
                    output.numel(),
                    &ins,
                    &outs};
    // Staged when input and output overlap: pieces would be overwritten before they are sent.
    Input source(input.is_alias_of(output) ? input.clone() : input);
    return issue(call, outs,
                 [source = std::move(source), target = Output(here, "output", output), sends, receives,
                  element = input.element_size()](Communicator& group, Operation& op) mutable {
                   std::vector<Bytes> from;
                   std::vector<MutableBytes> to;
                   const auto* read = static_cast<const std::byte*>(source.data());
                   auto* write = static_cast<std::byte*>(target.data());
                   for (size_t r = 0; r < sends.size(); ++r) {
                     from.push_back({read, static_cast<size_t>(sends[r] * element)});
                     to.push_back({write, static_cast<size_t>(receives[r] * element)});
                     read += sends[r] * element;
                     write += receives[r] * element;
                   }
                   group.all_to_all(op, from.data(), to.data());
                   target.commit();
                 });
  });
}

ProcessGroupArk::WorkPtr ProcessGroupArk::alltoall(Tensors& outputs, Tensors& inputs,
                                                   const c10d::AllToAllOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("all_to_all");
    check_count(here, "input_tensor_list", inputs.size(), size_, "one a rank");
    check_count(here, "output_tensor_list", outputs.size(), size_, "one a rank");
    for (int r = 0; r < size_; ++r) {
      const std::string in = "input_tensor_list[" + std::to_string(r) + "]";
      const std::string out = "output_tensor_list[" + std::to_string(r) + "]";
      check_tensor(here, in.c_str(), inputs[r]);
      check_tensor(here, out.c_str(), outputs[r]);
      check_same_dtype(here, in.c_str(), inputs[r], "input_tensor_list[0]", inputs[0]);
      check_same_dtype(here, out.c_str(), outputs[r], "input_tensor_list[0]", inputs[0]);
    }
    check_elements(here, "output_tensor_list[rank]", outputs[rank_].numel(), inputs[rank_].numel(),
                   "those of input_tensor_list[rank], which this rank keeps for itself");
    std::vector<int64_t> sends, receives;
    for (int r = 0; r < size_; ++r) {
      sends.push_back(inputs[r].numel());
      receives.push_back(outputs[r].numel());
    }
    CommsRecord record(
        comms(),
        [&] {
          return CommsCall{.name = "all_to_all",
                           .sequence = next_sequence(),
                           .rank = rank_,
                           .input_elements = elements_of(inputs),
                           .output_elements = elements_of(outputs),
                           .dtype = inputs[0].scalar_type(),
                           .input_splits = &sends,
                           .output_splits = &receives,
                           .async = options.asyncOp};
        },
        inputs, outputs);
    const Call call{c10d::OpType::ALLTOALL,
                    Kind::all_to_all,
                    here.operation,
                    options.timeout,
                    options.asyncOp,
                    inputs[0].scalar_type(),
                    -1,
                    {},
                    elements_of(inputs),
                    elements_of(outputs),
                    &inputs,
                    &outputs};
    Tensors sources = inputs;
    for (at::Tensor& source : sources) {
      for (const at::Tensor& target : outputs) {
        if (source.is_alias_of(target)) {
          source = source.clone();
          break;
        }
      }
    }
    return issue(call, outputs,
                 [sources = inputs_of(sources), targets = outputs_of(here, "output_tensor_list", outputs), sends,
                  receives, element = inputs[0].element_size()](Communicator& group, Operation& op) mutable {
                   std::vector<Bytes> from;
                   std::vector<MutableBytes> to;
                   for (size_t r = 0; r < sends.size(); ++r) {
                     from.push_back({sources[r].data(), static_cast<size_t>(sends[r] * element)});
                     to.push_back({targets[r].data(), static_cast<size_t>(receives[r] * element)});
                   }
                   group.all_to_all(op, from.data(), to.data());
                   for (Output& target : targets) target.commit();
                 });
  });
}

ProcessGroupArk::WorkPtr ProcessGroupArk::barrier(const c10d::BarrierOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("barrier");
    const Tensors none;
    CommsRecord record(
        comms(),
        [&] {
          return CommsCall{.name = "barrier",
                           .sequence = next_sequence(),
                           .rank = rank_,
                           .input_elements = 0,
                           .output_elements = 0,
                           .dtype = at::kByte,
                           .async = options.asyncOp};
        },
        none, none);
    const Call call{c10d::OpType::BARRIER, Kind::barrier, here.operation, options.timeout, options.asyncOp};
    return issue(call, {}, [](Communicator& group, Operation& op) { group.barrier(op); });
  });
}

}  // namespace ark
