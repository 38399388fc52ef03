// Several tensors in one call (functional collectives, FSDP, fused optimisers), and the coalescing manager.
//
// A coalesced call is one work whose body runs one collective per tensor, in order. Packing small tensors first gains
// nothing on shared memory and would require unpacking.
#include "process_group/cuda/work_cuda.hpp"
#include "process_group/process_group_ark.hpp"

namespace ark {

namespace {

// Checks every entry and that there is at least one.
void check_all(const CallSite& site, const char* argument, const Tensors& tensors) {
  if (tensors.empty()) {
    refuse(site, ErrorKind::invalid_argument, std::string(argument) + " is empty", "Pass at least one tensor.");
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_tensor(site, entry_of(argument, i).c_str(), tensors[i]);
  }
}

}  // namespace

ProcessGroupArk::WorkPtr ProcessGroupArk::allreduce_coalesced(Tensors& tensors,
                                                              const c10d::AllreduceCoalescedOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("all_reduce_coalesced");
    check_all(here, "tensors", tensors);
    std::vector<Reduction> reductions;
    for (const at::Tensor& tensor : tensors) {
      reductions.push_back(reduction_of(options.reduceOp, tensor.scalar_type(), rank_, here.operation));
    }
    const Call call{.type = c10d::OpType::ALLREDUCE_COALESCED,
                    .kind = Kind::all_reduce,
                    .name = here.operation,
                    .event = "allreduce_coalesced",
                    .timeout = options.timeout,
                    .async = options.asyncOp,
                    .reduction = reductions[0],
                    .inputs = tensors,
                    .outputs = tensors,
                    .carry = [&](c10d::Backend& carrier) { return carrier.allreduce_coalesced(tensors, options); }};
    return issue(call, [tensors, targets = outputs_of(here, "tensors", tensors, Use::update)](Communicator& group,
                                                                                              Operation& op) mutable {
      for (size_t i = 0; i < targets.size(); ++i) {
        op.descriptor.dtype = dtype_of(tensors[i].scalar_type());
        op.descriptor.count = tensors[i].numel();
        group.all_reduce(op, targets[i].data(), targets[i].data(), tensors[i].numel());
        targets[i].commit();
      }
    });
  });
}

ProcessGroupArk::WorkPtr ProcessGroupArk::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                              const c10d::AllgatherOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("all_gather_coalesced");
    check_all(here, "input_tensor_list", inputs);
    // One list per rank, each with an entry for every input.
    check_count(here, "output_tensor_lists", outputs.size(), size_, "one list a rank");
    Tensors flat;
    for (int r = 0; r < size_; ++r) {
      check_count(here, entry_of("output_tensor_lists", r).c_str(), outputs[r].size(), inputs.size(),
                  "one entry an input");
      for (size_t i = 0; i < inputs.size(); ++i) {
        const std::string name = entry_of(entry_of("output_tensor_lists", r).c_str(), i);
        check_tensor(here, name.c_str(), outputs[r][i]);
        check_same_dtype(here, name.c_str(), outputs[r][i], "its input", inputs[i]);
        check_elements(here, name.c_str(), outputs[r][i].numel(), inputs[i].numel(), "those of its input");
        flat.push_back(outputs[r][i]);
      }
    }
    const Call call{
        .type = c10d::OpType::ALLGATHER_COALESCED,
        .kind = Kind::all_gather,
        .name = here.operation,
        .event = "allgather_coalesced",
        .timeout = options.timeout,
        .async = options.asyncOp,
        .inputs = inputs,
        .outputs = outputs,
        .carry = [&](c10d::Backend& carrier) { return carrier.allgather_coalesced(outputs, inputs, options); }};
    return issue(call, [inputs, sources = inputs_of(inputs), targets = outputs_of(here, "output_tensor_lists", flat)](
                           Communicator& group, Operation& op) mutable {
      std::vector<void*> places(group.size());
      for (size_t i = 0; i < sources.size(); ++i) {
        for (int r = 0; r < group.size(); ++r) places[r] = targets[r * sources.size() + i].data();
        op.descriptor.dtype = dtype_of(inputs[i].scalar_type());
        op.descriptor.count = inputs[i].numel();
        group.all_gather(op, sources[i].data(), places.data(), inputs[i].nbytes());
      }
      for (Output& target : targets) target.commit();
    });
  });
}

ProcessGroupArk::WorkPtr ProcessGroupArk::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                          const c10d::AllgatherOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("all_gather_into_tensor_coalesced");
    check_all(here, "inputs", inputs);
    check_count(here, "outputs", outputs.size(), inputs.size(), "one an input");
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_tensor(here, entry_of("outputs", i).c_str(), outputs[i]);
      check_same_dtype(here, entry_of("outputs", i).c_str(), outputs[i], entry_of("inputs", i).c_str(), inputs[i]);
      check_elements(here, entry_of("outputs", i).c_str(), outputs[i].numel(), inputs[i].numel() * size_,
                     "those of its input for every rank");
    }
    const Call call{.type = c10d::OpType::COALESCED,
                    .kind = Kind::all_gather,
                    .name = here.operation,
                    .event = "allgather_into_tensor_coalesced",
                    .timeout = options.timeout,
                    .async = options.asyncOp,
                    .inputs = inputs,
                    .outputs = outputs,
                    .carry = [&](c10d::Backend& carrier) {
                      return carrier.allgather_into_tensor_coalesced(outputs, inputs, options);
                    }};
    return issue(call, [inputs, sources = inputs_of(inputs), targets = outputs_of(here, "outputs", outputs)](
                           Communicator& group, Operation& op) mutable {
      for (size_t i = 0; i < sources.size(); ++i) {
        const size_t bytes = inputs[i].nbytes();
        op.descriptor.dtype = dtype_of(inputs[i].scalar_type());
        op.descriptor.count = inputs[i].numel();
        group.all_gather(op, sources[i].data(), split_evenly(targets[i].data(), group.size(), bytes).data(), bytes);
        targets[i].commit();
      }
    });
  });
}

ProcessGroupArk::WorkPtr ProcessGroupArk::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                          const c10d::ReduceScatterOptions& options) {
  return with_torch_errors([&] {
    const CallSite here = site("reduce_scatter_tensor_coalesced");
    check_all(here, "inputs", inputs);
    check_count(here, "outputs", outputs.size(), inputs.size(), "one an input");
    std::vector<Reduction> reductions;
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_tensor(here, entry_of("outputs", i).c_str(), outputs[i]);
      check_same_dtype(here, entry_of("outputs", i).c_str(), outputs[i], entry_of("inputs", i).c_str(), inputs[i]);
      check_elements(here, entry_of("inputs", i).c_str(), inputs[i].numel(), outputs[i].numel() * size_,
                     "those of its output for every rank");
      reductions.push_back(reduction_of(options.reduceOp, inputs[i].scalar_type(), rank_, here.operation));
    }
    const Call call{.type = c10d::OpType::COALESCED,
                    .kind = Kind::reduce_scatter,
                    .name = here.operation,
                    .event = "reduce_scatter_tensor_coalesced",
                    .timeout = options.timeout,
                    .async = options.asyncOp,
                    .reduction = reductions[0],
                    .inputs = inputs,
                    .outputs = outputs,
                    .carry = [&](c10d::Backend& carrier) {
                      return carrier.reduce_scatter_tensor_coalesced(outputs, inputs, options);
                    }};
    return issue(call, [outputs, sources = inputs_of(inputs), targets = outputs_of(here, "outputs", outputs)](
                           Communicator& group, Operation& op) mutable {
      for (size_t i = 0; i < sources.size(); ++i) {
        const auto parts = split_evenly(sources[i].data(), group.size(), outputs[i].nbytes());
        op.descriptor.dtype = dtype_of(outputs[i].scalar_type());
        op.descriptor.count = outputs[i].numel();
        group.reduce_scatter(op, parts.data(), targets[i].data(), outputs[i].numel());
        targets[i].commit();
      }
    });
  });
}

// Works between startCoalescing and endCoalescing of one thread are issued as usual. endCoalescing returns one work
// that completes when all of them have. PyTorch's manager never ends a batch in which a call was refused, so the
// thread's next batch frees what is left. PyTorch ensures that batches do not nest.
void ProcessGroupArk::startCoalescing() {
  with_torch_errors([&] {
    site("_start_coalescing");
    Coalescing left_behind;  // freed outside the lock
    {
      std::lock_guard lock(mutex_);
      const auto [batch, fresh] = coalescing_.try_emplace(std::this_thread::get_id());
      if (fresh) {
        coalescing_threads_.fetch_add(1);
      } else {
        std::swap(left_behind, batch->second);
      }
    }
    if (left_behind.carrier) left_behind.carrier->endCoalescing();
  });
}

ProcessGroupArk::WorkPtr ProcessGroupArk::endCoalescing() {
  return with_torch_errors([&]() -> WorkPtr {
    const CallSite here = site("_end_coalescing");
    Coalescing ended;
    {
      std::lock_guard lock(mutex_);
      const auto found = coalescing_.find(std::this_thread::get_id());
      if (found == coalescing_.end()) {
        refuse(here, ErrorKind::invalid_argument, "this thread is not coalescing", "Call _start_coalescing first.");
      }
      ended = std::move(found->second);
      coalescing_.erase(found);
      coalescing_threads_.fetch_sub(1);
    }
    // End the carrier's batch even on error; otherwise its next batch would be nested.
    if (ended.carrier) {
      if (auto carried = ended.carrier->endCoalescing()) ended.works.push_back(std::move(carried));
    }
    if (!ended.self_sends.empty() || !ended.self_recvs.empty()) {
      const bool sends = !ended.self_sends.empty();
      refuse(here, ErrorKind::invalid_argument,
             std::string(sends ? "a send to" : "a recv from") + " this rank, " + std::to_string(rank_) +
                 ", has no counterpart in the batch",
             "Put both ends into the same batch_isend_irecv.");
    }
    std::vector<WorkPtr> parts = std::move(ended.works);
    if (parts.empty()) return nullptr;
    if (parts.size() == 1) return parts[0];
    if (auto on_device = join_cuda(core_, parts)) return on_device;
    Tensors outputs;
    for (const WorkPtr& part : parts) {
      for (const at::Tensor& tensor : part->result()) outputs.push_back(tensor);
    }
    auto all = make_work(c10d::OpType::COALESCED, "coalesced", std::move(outputs));
    all->operation.context.sequence = parts.back()->getSequencenumber();
    follow(all, std::move(parts), {}, core_->executor);
    return all;
  });
}

}  // namespace ark
