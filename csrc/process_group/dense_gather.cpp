// broadcast, all_gather, gather and scatter. Each method checks all arguments before any byte moves, describes the
// operation and passes it to the communicator.
#include "process_group/process_group_ark.hpp"

namespace ark {

namespace {

// One tensor per rank, each with the shape and dtype of `like`.
void check_list(const CallSite& site, const char* argument, const Tensors& list, int size, const char* like_argument,
                const at::Tensor& like) {
  check_count(site, argument, list.size(), size, "one a rank");
  for (size_t r = 0; r < list.size(); ++r) {
    const std::string entry = entry_of(argument, r);
    check_tensor(site, entry.c_str(), list[r]);
    check_same_dtype(site, entry.c_str(), list[r], like_argument, like);
    check_elements(site, entry.c_str(), list[r].numel(), like.numel(), std::string("as many as ") + like_argument);
  }
}

// One tensor per rank, whose sizes may differ; this rank's entry matches `own`.
void check_uneven(const CallSite& site, const char* argument, const Tensors& list, const at::Tensor& own) {
  for (size_t r = 0; r < list.size(); ++r) {
    const std::string entry = entry_of(argument, r);
    check_tensor(site, entry.c_str(), list[r]);
    check_same_dtype(site, entry.c_str(), list[r], "tensor", own);
  }
  check_elements(site, entry_of(argument, site.rank).c_str(), list[site.rank].numel(), own.numel(),
                 "as many as tensor, being this rank's");
}

// The list of tensors that only the root of a gather or scatter passes.
Tensors list_of_root(const CallSite& site, const char* argument, const std::vector<Tensors>& lists, int size,
                     int64_t root, const char* root_is, const char* why_one, const at::Tensor& like) {
  if (root == site.rank) {
    check_count(site, argument, lists.size(), 1, why_one);
    check_list(site, argument, lists[0], size, "tensor", like);
    return lists[0];
  }
  if (!lists.empty() && !(lists.size() == 1 && lists[0].empty())) {
    refuse(site, ErrorKind::invalid_argument,
           std::string(argument) + " is given on rank " + std::to_string(site.rank) + ", which is not the " + root_is +
               " (" + std::to_string(root) + ")",
           std::string("Pass it on the ") + root_is + " only.");
  }
  return {};
}

}  // namespace

ProcessGroupArk::WorkPtr ProcessGroupArk::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("broadcast");
    const at::Tensor& tensor = only(here, "tensor", tensors);
    check_rank(here, "src", options.rootRank, size_);
    const Call call{.type = c10d::OpType::BROADCAST,
                    .kind = Kind::broadcast,
                    .name = here.operation,
                    .event = "broadcast",
                    .timeout = options.timeout,
                    .async = options.asyncOp,
                    .root = options.rootRank,
                    .inputs = tensors,
                    .outputs = tensors,
                    .shape = debug_shape(tensor),
                    .carry = [&](c10d::Backend& carrier) { return carrier.broadcast(tensors, options); }};
    const bool root = options.rootRank == rank_;
    return issue(call, [target = Output(here, "tensor", tensor, root ? Use::read : Use::write), bytes = tensor.nbytes(),
                        root](Communicator& group, Operation& op) mutable {
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
    const Tensors& list = outputs[0];
    check_count(here, "tensor_list", list.size(), size_, "one a rank");
    // Different sizes are supported for CUDA tensors only, as with NCCL. Gloo does not support them, and an error on
    // all ranks is more useful.
    bool even = true;
    for (const at::Tensor& entry : list)
      even &= !input.is_cuda() || (entry.defined() && entry.numel() == input.numel());
    if (even) {
      check_list(here, "tensor_list", list, size_, "tensor", input);
    } else {
      check_uneven(here, "tensor_list", list, input);
    }
    const Call call{.type = c10d::OpType::ALLGATHER,
                    .kind = even ? Kind::all_gather : Kind::all_to_all,  // with uneven sizes, ranks share no count
                    .name = here.operation,
                    .event = "all_gather",
                    .timeout = options.timeout,
                    .async = options.asyncOp,
                    .inputs = inputs,
                    .outputs = outputs,
                    .shape = even ? debug_shape(input) : debug_shape(list),
                    .carry = [&](c10d::Backend& carrier) { return carrier.allgather(outputs, inputs, options); }};
    if (!even) {
      // Every rank sends its whole tensor to every other rank.
      std::vector<size_t> bytes;
      for (const at::Tensor& entry : list) bytes.push_back(entry.nbytes());
      return issue(call, [source = Input(input), targets = outputs_of(here, "tensor_list", list),
                          bytes = std::move(bytes)](Communicator& group, Operation& op) mutable {
        std::vector<Bytes> from(bytes.size(), Bytes{source.data(), bytes[group.rank()]});
        std::vector<MutableBytes> to;
        for (size_t r = 0; r < bytes.size(); ++r) to.push_back({targets[r].data(), bytes[r]});
        op.descriptor.kind = Kind::all_to_all;
        op.descriptor.count = 0;  // ranks share no count
        group.all_to_all(op, from.data(), to.data());
        for (Output& target : targets) target.commit();
      });
    }
    return issue(call, [source = Input(input), targets = outputs_of(here, "tensor_list", outputs[0]),
                        bytes = input.nbytes()](Communicator& group, Operation& op) mutable {
      group.all_gather(op, source.data(), places_of(targets).data(), bytes);
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
    const Call call{.type = c10d::OpType::_ALLGATHER_BASE,
                    .kind = Kind::all_gather,
                    .name = here.operation,
                    .event = "_allgather_base",
                    .timeout = options.timeout,
                    .async = options.asyncOp,
                    .inputs = input,
                    .outputs = output,
                    .shape = debug_shape(input),
                    .carry = [&](c10d::Backend& carrier) { return carrier._allgather_base(output, input, options); }};
    return issue(call, [source = Input(input), target = Output(here, "output_tensor", output), bytes = input.nbytes()](
                           Communicator& group, Operation& op) mutable {
      group.all_gather(op, source.data(), split_evenly(target.data(), group.size(), bytes).data(), bytes);
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
    const Tensors list = list_of_root(here, "gather_list", outputs, size_, options.rootRank, "destination",
                                      "one list for the one input", input);
    const Call call{.type = c10d::OpType::GATHER,
                    .kind = Kind::gather,
                    .name = here.operation,
                    .event = "gather",
                    .timeout = options.timeout,
                    .async = options.asyncOp,
                    .root = options.rootRank,
                    .inputs = inputs,
                    .outputs = outputs,
                    .shape = debug_shape(input),
                    .carry = [&](c10d::Backend& carrier) { return carrier.gather(outputs, inputs, options); }};
    return issue(call, [source = Input(input), targets = outputs_of(here, "gather_list", list), bytes = input.nbytes()](
                           Communicator& group, Operation& op) mutable {
      group.gather(op, source.data(), places_of(targets).data(), bytes);
      for (Output& target : targets) target.commit();
    });
  });
}

#if ARK_TORCH_AT_LEAST(14)  // older versions do not pass it to a carrier
ProcessGroupArk::WorkPtr ProcessGroupArk::gather_single(at::Tensor& output, at::Tensor& input,
                                                        const c10d::GatherOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("gather_single");
    check_tensor(here, "tensor", input);
    check_rank(here, "dst", options.rootRank, size_);
    const bool root = options.rootRank == rank_;
    if (root) {
      check_tensor(here, "gather_tensor", output);
      check_same_dtype(here, "gather_tensor", output, "tensor", input);
      check_elements(here, "gather_tensor", output.numel(), input.numel() * size_, "those of tensor for every rank");
    }
    const Tensors outputs = root ? Tensors{output} : Tensors{};
    const Call call{.type = c10d::OpType::GATHER,
                    .kind = Kind::gather,
                    .name = here.operation,
                    .event = "gather",
                    .timeout = options.timeout,
                    .async = options.asyncOp,
                    .root = options.rootRank,
                    .inputs = input,
                    .outputs = outputs,
                    .shape = debug_shape(input),
                    .carry = [&](c10d::Backend& carrier) { return carrier.gather_single(output, input, options); }};
    return issue(call, [source = Input(input), target = root ? Output(here, "gather_tensor", output) : Output(), root,
                        bytes = input.nbytes()](Communicator& group, Operation& op) mutable {
      std::vector<void*> places;
      if (root) places = split_evenly(target.data(), group.size(), bytes);
      group.gather(op, source.data(), places.data(), bytes);
      target.commit();
    });
  });
}
#endif

ProcessGroupArk::WorkPtr ProcessGroupArk::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                  const c10d::ScatterOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("scatter");
    const at::Tensor& output = only(here, "tensor", outputs);
    check_rank(here, "src", options.rootRank, size_);
    const Tensors list = list_of_root(here, "scatter_list", inputs, size_, options.rootRank, "source",
                                      "one list for the one output", output);
    const Call call{.type = c10d::OpType::SCATTER,
                    .kind = Kind::scatter,
                    .name = here.operation,
                    .event = "scatter",
                    .timeout = options.timeout,
                    .async = options.asyncOp,
                    .root = options.rootRank,
                    .inputs = inputs,
                    .outputs = outputs,
                    .shape = debug_shape(output),
                    .carry = [&](c10d::Backend& carrier) { return carrier.scatter(outputs, inputs, options); }};
    return issue(call, [sources = inputs_of(list), target = Output(here, "tensor", output), bytes = output.nbytes()](
                           Communicator& group, Operation& op) mutable {
      group.scatter(op, places_of(sources).data(), target.data(), bytes);
      target.commit();
    });
  });
}

}  // namespace ark
