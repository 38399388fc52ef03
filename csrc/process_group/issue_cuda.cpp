// The way of operations on CUDA tensors: which device, who carries them, and the enqueueing.
//
// The group's side on the device is made at its first operation there, by all ranks together (whatever that operation
// is, a send included); so not under graph capture, where nothing can wait for peers. Where ark cannot move the bytes
// between these GPUs, PyTorch's NCCL is given the very same calls. A rank uses one device a group, the first it used.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "process_group/cuda_group.hpp"
#include "process_group/process_group_ark.hpp"
#include "process_group/work_cuda.hpp"

namespace ark {

c10::Device ProcessGroupArk::device_of(const Call& call) const {
  std::optional<c10::Device> device;
  std::string first;
  const auto look = [&](const char* argument, const TensorArgument& tensors) {
    size_t index = 0;
    tensors.for_each([&](const at::Tensor& tensor) {
      if (!device) {
        device = tensor.device();
        first = argument;
      } else if (*device != tensor.device()) {
        refuse({rank_, call.name}, ErrorKind::invalid_argument,
               entry_of(argument, index) + " is on " + tensor.device().str() + " but " + first + "[0] is on " +
                   device->str(),
               "Give one call tensors of one device.");
      }
      ++index;
    });
  };
  look("input", call.inputs);
  look("output", call.outputs);
  return device.value_or(c10::Device(c10::kCPU));
}

std::string ProcessGroupArk::cuda_carrier() const {
  const auto cuda = core_->cuda();
  return !cuda ? "" : cuda->carrier ? cuda->carrier->getBackendName() : "ark";
}

std::shared_ptr<CudaGroup> ProcessGroupArk::cuda_side(const char* operation, c10::Device device) {
  auto cuda = core_->cuda();
  if (!cuda) cuda = join_on(operation, device);
  if (cuda->device != device) {
    refuse({rank_, operation}, ErrorKind::invalid_argument,
           "the tensor is on " + device.str() + ", but this group uses " + cuda->device.str() +
               " on this rank, the device of its first operation on CUDA tensors",
           "Move the tensor there (torch.cuda.set_device early), or use a group for each device.");
  }
  return cuda;
}

std::shared_ptr<CudaGroup> ProcessGroupArk::join_on(const char* operation, c10::Device device) {
  const CallSite here{rank_, operation};
  if (const auto bound = getBoundDeviceId(); bound && bound->is_cuda() && *bound != device) {
    refuse(here, ErrorKind::invalid_argument,
           "the tensor is on " + device.str() + ", but init_process_group was given device_id=" + bound->str(),
           "Move the tensor there, or name this device.");
  }
  const std::lock_guard lock(joining_);
  if (auto made = core_->cuda()) return made;
  if (cuda_failure_) throw *cuda_failure_;
  if (is_capturing(device)) {
    refuse(here, ErrorKind::invalid_argument,
           "this group's first operation on CUDA tensors is under graph capture, where ranks cannot meet",
           "Call one collective on CUDA tensors, on all ranks, before the capture begins.");
  }
  try {
    if (options_->before_cuda) options_->before_cuda();
    std::string why = "its ranks share no memory";
    std::shared_ptr<CudaGroup> side;
    if (core_->shm) {
      auto store = std::make_shared<StoreAdapter>(c10::make_intrusive<c10d::PrefixStore>("ark/cuda/" + start_, store_));
      CudaCommunicator::Options options;
      options.device = device.index();
      options.timeout = std::chrono::milliseconds(core_->timeout_ms.load());
      options.log = [core = core_.get()](const Error& error) { core->device_gave_up(error); };
      auto communicator = CudaCommunicator::create(rank_, size_, store, core_->shm->health(), options, why);
      if (communicator) side = std::make_shared<CudaGroup>(device, std::move(communicator));
    }
    if (!side) {
      if (!options_->make_cuda_carrier) {
        throw Error(ErrorKind::system,
                    "ark cannot move CUDA tensors of this group (" + why + ") and nothing else is set",
                    ErrorContext{rank_, -1, operation, 0,
                                 "Set Options::make_cuda_carrier to a function that makes an NCCL group, or pass CPU "
                                 "tensors."});
      }
      if (rank_ == 0 && options_->log) {
        options_->log("group \"" + options_->group_name + "\" of " + std::to_string(size_) +
                      " ranks: CUDA tensors are carried by PyTorch's NCCL: " + why);
      }
      side = std::make_shared<CudaGroup>(
          device, options_->make_cuda_carrier(c10::make_intrusive<c10d::PrefixStore>("cuda-carrier/" + start_, store_),
                                              rank_, size_, std::chrono::milliseconds(core_->timeout_ms.load())));
    }
    core_->adopt(side);
    return side;
  } catch (const Error& error) {
    cuda_failure_ = error.at(rank_, operation);  // the peers have gone on: there is no second try
  } catch (const std::exception& error) {
    cuda_failure_ = Error(ErrorKind::system, std::string("CUDA tensors cannot be used: ") + error.what(),
                          ErrorContext{rank_, -1, operation, 0, "Pass CPU tensors, or see the cause above."});
  }
  throw *cuda_failure_;
}

ProcessGroupArk::WorkPtr ProcessGroupArk::carry_cuda(const Call& call, CudaGroup& cuda) {
  if (!call.carry) {
    refuse({rank_, call.name}, ErrorKind::invalid_argument,
           cuda.carrier->getBackendName() + ", which carries CUDA tensors of this group, has no such operation",
           "Pass CPU tensors.");
  }
  if (coalescing_threads_.load(std::memory_order_relaxed) != 0) {
    const std::lock_guard lock(mutex_);
    const auto found = coalescing_.find(std::this_thread::get_id());
    if (found != coalescing_.end() && !found->second.carrier) {
      cuda.carrier->startCoalescing();
      found->second.carrier = cuda.carrier;
    }
  }
  return call.carry(*cuda.carrier);
}

c10::intrusive_ptr<CudaWork> ProcessGroupArk::enqueue(const Call& call, Body body, CudaGroup& cuda) {
  const CommsRecord event(comms(), [&] { return comms_call(call); });
  const FlightEntry entry = flight_entry(call);
  Operation operation = describe(call, entry);
  uint64_t flight = 0;
  CudaGroup::Request request;
  request.own_stream = call.async;
  request.timed = core_->timing.load(std::memory_order_relaxed);
  request.type = call.type;
  request.name = call.name;
  request.number = [&] {
    const auto numbered = core_->number(entry);
    operation.descriptor.sequence = numbered.first;
    flight = numbered.second;
    return numbered;
  };
  // The body holds the tensors and their staged copies.
  auto held = std::make_shared<Body>(std::move(body));
  request.keep = held;
  try {
    auto enqueued = cuda.enqueue(std::move(request), [&](CudaCommunicator& group, void* stream, uint64_t sequence) {
      operation.context = core_->context(call.name, sequence, call.timeout);
      operation.stream = stream;
      (*held)(group, operation);
    });
    auto work = c10::make_intrusive<CudaWork>(core_, core_->cuda(), call.type, call.name, call.outputs.flat(),
                                              CudaWork::Parts{std::move(enqueued)});
    work->timeout = call.timeout;
    return work;
  } catch (const Error& error) {
    const Error told = error.at(rank_, call.name, operation.descriptor.sequence);
    core_->failed(flight, told);
    throw told;
  }
}

ProcessGroupArk::WorkPtr ProcessGroupArk::issue_cuda(const Call& call, Body body, c10::Device device) {
  const auto cuda = cuda_side(call.name, device);
  if (cuda->carrier) return carry_cuda(call, *cuda);
  return collect(enqueue(call, std::move(body), *cuda));
}

ProcessGroupArk::WorkPtr ProcessGroupArk::transfer_cuda(const Call& call, const FlightEntry& entry, uint64_t number,
                                                        int peer) {
  const auto cuda = cuda_side(call.name, device_of(call));
  if (cuda->carrier) return carry_cuda(call, *cuda);
  const bool is_send = call.type == c10d::OpType::SEND;
  const at::Tensor& tensor = *call.inputs.first();
  struct Held {
    Input source;
    Output target;
  };
  auto held = std::make_shared<Held>();
  if (is_send) {
    held->source = Input(tensor);
  } else {
    held->target = Output({rank_, call.name}, "tensor", tensor);
  }
  uint64_t flight = 0;
  CudaGroup::Request request;
  request.line = CudaGroup::line_of(peer, is_send);
  request.own_stream = true;  // so that no pattern of messages can wait for itself
  request.timed = core_->timing.load(std::memory_order_relaxed);
  request.type = call.type;
  request.name = call.name;
  request.number = [&] { return std::pair(number, flight = FlightRecord::instance().scheduled(entry)); };
  request.keep = held;
  Operation operation = describe(call, entry);
  operation.descriptor.sequence = number;
  try {
    auto enqueued = cuda->enqueue(std::move(request), [&](CudaCommunicator& group, void* stream, uint64_t sequence) {
      operation.context = core_->context(call.name, sequence, call.timeout);
      operation.stream = stream;
      if (is_send) {
        group.send(operation, held->source.data(), tensor.nbytes(), peer);
      } else {
        group.recv(operation, held->target.data(), tensor.nbytes(), peer);
        held->target.commit();
      }
    });
    auto work = c10::make_intrusive<CudaWork>(core_, cuda, call.type, call.name, call.outputs.flat(),
                                              CudaWork::Parts{std::move(enqueued)});
    work->source_rank = peer;
    return collect(std::move(work));
  } catch (const Error& error) {
    const Error told = error.at(rank_, call.name, number);
    core_->failed(flight, told);
    throw told;
  }
}

std::optional<c10::Device> ProcessGroupArk::barrier_device(const c10d::BarrierOptions& options) {
  if (const auto cuda = core_->cuda()) return cuda->device;
  if (const auto bound = getBoundDeviceId(); bound && bound->is_cuda()) return bound;
  if (!options.device || !options.device->is_cuda()) return std::nullopt;
  return options.device->has_index() ? *options.device : cuda_guard().getDevice();
}

ProcessGroupArk::WorkPtr ProcessGroupArk::barrier_cuda(const Call& call, const c10d::BarrierOptions& options,
                                                       c10::Device device) {
  const auto cuda = cuda_side(call.name, device);
  const Body body = [](Communicator& group, Operation& op) { group.barrier(op); };
  const bool captured = is_capturing(device);
  WorkPtr on_host;
  if (!captured) {
    // Behind what was issued on CPU tensors.
    auto work = make_work(call.type, call.name, {});
    work->body = [core = core_.get(), operation = describe(call, flight_entry(call)), name = call.name,
                  timeout = call.timeout](WorkArk& running) mutable {
      operation.context = core->context(name, running.sequence, timeout);
      operation.descriptor.sequence = running.sequence;
      try {
        core->communicator->barrier(operation);
      } catch (const Error& error) {
        throw error.at(core->rank, name, running.sequence);
      }
    };
    core_->submit(work, call.async, flight_entry(call));
    if (!call.async) work->wait();
    on_host = work;
  }
  if (cuda->carrier) {
    c10d::BarrierOptions carried = options;
    carried.device = device;
    carried.device_ids = {device.index()};
    auto work = cuda->carrier->barrier(carried);
    if (on_host && call.async) on_host->wait();
    return work;
  }
  auto work = enqueue(call, body, *cuda);
  work->blocks_host = true;
  if (call.async) work->host_part = on_host;
  return collect(std::move(work));
}

ProcessGroupArk::WorkPtr ProcessGroupArk::all_reduce_sparse_cuda(const at::Tensor& tensor,
                                                                 const c10d::AllreduceOptions& options) {
  // Reduced on the host, in rank order like any other: adding up rows on a device is not repeatable. Blocks the host,
  // asynchronous or not, as sizes that only the device knows do anyway.
  if (is_capturing(tensor.device())) {
    refuse({rank_, "all_reduce_sparse"}, ErrorKind::invalid_argument, "tensor is sparse, and a graph is being captured",
           "Reduce sparse tensors outside of graphs.");
  }
  const auto cuda = cuda_side("all_reduce_sparse", tensor.device());
  Tensors on_host{tensor.cpu()};
  c10d::AllreduceOptions blocking = options;
  blocking.asyncOp = false;
  auto reduced = allreduce_sparse(on_host, blocking);
  reduced->wait();
  at::Tensor(tensor).copy_(on_host[0]);
  return c10::make_intrusive<CudaWork>(core_, cuda, c10d::OpType::_ALLREDUCE_SPARSE, "all_reduce_sparse",
                                       Tensors{tensor}, CudaWork::Parts{});
}

}  // namespace ark
