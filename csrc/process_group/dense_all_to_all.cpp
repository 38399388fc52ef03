// all_to_all of one tensor or of lists, and barrier. Each method checks all arguments before any byte moves, describes
// the operation and passes it to the communicator.
//
// The blocks of a rank may differ in size; sizes travel first. Inputs that overlap with outputs are copied, since
// received blocks would overwrite data that is not sent yet.
#include <ATen/MemoryOverlap.h>

#include "process_group/process_group_ark.hpp"

namespace ark {

namespace {

// Whether two tensors may have elements in common. Parts of one storage that lie apart have none.
bool overlap(const at::Tensor& one, const at::Tensor& other) {
  return one.is_alias_of(other) && at::get_overlap_status(one, other) != at::MemOverlapStatus::No;
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
    const Call call{.type = c10d::OpType::ALLTOALL_BASE,
                    .kind = Kind::all_to_all,
                    .name = here.operation,
                    .event = input_splits.empty() && output_splits.empty() ? "all_to_all" : "all_to_allv",
                    .timeout = options.timeout,
                    .async = options.asyncOp,
                    .inputs = input,
                    .outputs = output,
                    .input_splits = &input_splits,
                    .output_splits = &output_splits,
                    .even = input_splits.empty() && output_splits.empty(),
                    .carry = [&](c10d::Backend& carrier) {
                      return carrier.alltoall_base(output, input, output_splits, input_splits, options);
                    }};
    // Copy overlapping inputs: received blocks would overwrite data before it is sent.
    Input source(overlap(input, output) ? input.clone() : input);
    return issue(call, [source = std::move(source), target = Output(here, "output", output), sends, receives,
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
      const std::string in = entry_of("input_tensor_list", r);
      const std::string out = entry_of("output_tensor_list", r);
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
    const Call call{.type = c10d::OpType::ALLTOALL,
                    .kind = Kind::all_to_all,
                    .name = here.operation,
                    .event = "all_to_all",
                    .timeout = options.timeout,
                    .async = options.asyncOp,
                    .inputs = inputs,
                    .outputs = outputs,
                    .input_splits = &sends,
                    .output_splits = &receives,
                    .carry = [&](c10d::Backend& carrier) { return carrier.alltoall(outputs, inputs, options); }};
    Tensors sources = inputs;
    for (at::Tensor& source : sources) {
      for (const at::Tensor& target : outputs) {
        if (overlap(source, target)) {
          source = source.clone();
          break;
        }
      }
    }
    return issue(call, [sources = inputs_of(sources), targets = outputs_of(here, "output_tensor_list", outputs), sends,
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
    const Call call{.type = c10d::OpType::BARRIER,
                    .kind = Kind::barrier,
                    .name = here.operation,
                    .event = "barrier",
                    .timeout = options.timeout,
                    .async = options.asyncOp};
    if (const auto device = barrier_device(options)) return barrier_cuda(call, options, *device);
    return issue(call, [](Communicator& group, Operation& op) { group.barrier(op); });
  });
}

}  // namespace ark
