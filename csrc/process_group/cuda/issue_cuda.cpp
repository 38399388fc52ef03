// The way of operations on CUDA tensors from their description to what is enqueued: collectives, messages, barriers.
//
// A barrier waits on the host first, behind what was issued on CPU tensors, then for the device. Messages have a line
// of their own for each peer and direction; tags are not looked at, as with NCCL.
#include "collectives/cuda/tile_memory.hpp"
#include "process_group/cuda/cuda_group.hpp"
#include "process_group/cuda/work_cuda.hpp"
#include "process_group/process_group_ark.hpp"

namespace ark {

c10::intrusive_ptr<CudaWork> ProcessGroupArk::enqueue(const Call& call, Body body,
                                                      const std::shared_ptr<CudaGroup>& cuda) {
  const CommsRecord event(comms(), [&] { return comms_call(call); });
  const FlightEntry entry = flight_entry(call);
  Operation operation = describe(call, entry);
  uint64_t flight = 0;
  CudaGroup::Request request;
  request.own_stream = call.async;
  request.timed = core_->timing.load(std::memory_order_relaxed);
  request.type = call.type;
  request.name = call.name;
  const auto number = [&] {
    const auto numbered = core_->number(entry);
    operation.descriptor.sequence = numbered.first;
    flight = numbered.second;
    return numbered;
  };
  // The body holds the tensors and their staged copies; with them goes the share of what extends the timeout.
  const auto share = core_->extension->take();
  const auto timeout = core_->extended(call.timeout, share);
  const auto held = std::make_shared<std::pair<Body, TimeoutExtension::SharePtr>>(std::move(body), share);
  request.keep = held;
  std::string no_engines;
  const auto run = [&](CudaCommunicator& group, void* stream, uint64_t sequence) {
    operation.context = core_->context(call.name, sequence, timeout);
    operation.stream = stream;
    if (cuda->nccl && cuda->nccl->ready()) {
      SharedCommunicator shared(group, *cuda->nccl, call.even);
      held->first(shared, operation);
    } else {
      held->first(group, operation);
    }
    if (!told_of_engines_.load(std::memory_order_relaxed)) no_engines = group.engine_refusal();
  };
  try {
    auto enqueued = cuda->enqueue(std::move(request), number, run);
    if (!no_engines.empty()) tell_of_engines(no_engines);
    auto work = c10::make_intrusive<CudaWork>(core_, cuda, call.type, call.name, call.outputs.flat(),
                                              CudaWork::Parts{std::move(enqueued)});
    work->timeout = timeout;
    return work;
  } catch (const Error& error) {
    const Error told = error.at(rank_, call.name, operation.descriptor.sequence);
    core_->not_enqueued(flight, told);
    throw told;
  }
}

// The log may wait for the GIL, so that no lock is held here.
void ProcessGroupArk::tell_of_engines(const std::string& why) {
  if (told_of_engines_.exchange(true) || rank_ != 0 || !options_->log) return;
  options_->log("group \"" + options_->group_name + "\" of " + std::to_string(size_) +
                " ranks: kernels move what copy engines would, which share no memory: " + why);
}

ProcessGroupArk::WorkPtr ProcessGroupArk::issue_cuda(const Call& call, Body body, c10::Device device) {
  const auto cuda = cuda_side(call.name, device);
  if (cuda->carrier) return carry_cuda(call, *cuda);
  if (cuda->nccl) meet_for_nccl(call, *cuda);
  return collect(enqueue(call, std::move(body), cuda));
}

bool ProcessGroupArk::launch_region(const char* name, c10::Device device, RegionLaunch launch) {
  site(name);
  const auto cuda = cuda_side(name, device);
  if (cuda->carrier) return false;
  Call call{};
  call.type = c10d::OpType::UNKNOWN;
  call.name = call.event = name;
  call.timeout = c10d::kUnsetTimeout;
  const auto body = [&](Communicator&, Operation& operation) {
    if (const auto communicator = cuda->communicator()) launch(*communicator, operation);
  };
  enqueue(call, body, cuda);
  return true;
}

void ProcessGroupArk::check_region(const char* name, c10::Device device) {
  const auto communicator = cuda_side(name, device)->communicator();
  if (communicator == nullptr) return;
  try {
    communicator->check(core_->context(name, 0, c10d::kUnsetTimeout));
  } catch (const Error& error) {
    throw error.at(rank_, name);
  }
}

std::optional<bool> ProcessGroupArk::agreed(const std::vector<int64_t>& key) const {
  const std::lock_guard lock(agreeing_);
  const auto found = agreed_.find(key);
  return found == agreed_.end() ? std::nullopt : std::optional(found->second);
}

void ProcessGroupArk::agree(const std::vector<int64_t>& key, bool value) {
  constexpr size_t kMost = 4096;  // shapes; forgotten on all ranks by the same call
  const std::lock_guard lock(agreeing_);
  if (agreed_.size() >= kMost) agreed_.clear();
  agreed_.emplace(key, value);
}

std::optional<device::TileReport> ProcessGroupArk::tile_failure() const {
  const auto cuda = core_->cuda();
  const auto communicator = cuda ? cuda->communicator() : nullptr;
  const TileMemory* const tiles = communicator ? communicator->known_tiles() : nullptr;
  return tiles == nullptr ? std::nullopt : tiles->failure();
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
    TimeoutExtension::SharePtr share;
  };
  auto held = std::make_shared<Held>();
  held->share = core_->extension->take();
  const auto timeout = core_->extended(call.timeout, held->share);
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
  request.keep = held;
  Operation operation = describe(call, entry);
  operation.descriptor.sequence = number;
  const auto schedule = [&] { return std::pair(number, flight = FlightRecord::instance().scheduled(entry)); };
  const auto run = [&](CudaCommunicator& group, void* stream, uint64_t sequence) {
    operation.context = core_->context(call.name, sequence, timeout);
    operation.stream = stream;
    if (is_send) {
      group.send(operation, held->source.data(), tensor.nbytes(), peer);
    } else {
      group.recv(operation, held->target.data(), tensor.nbytes(), peer);
      held->target.commit();
    }
  };
  try {
    auto enqueued = cuda->enqueue(std::move(request), schedule, run);
    auto work = c10::make_intrusive<CudaWork>(core_, cuda, call.type, call.name, call.outputs.flat(),
                                              CudaWork::Parts{std::move(enqueued)});
    work->source_rank = peer;
    work->timeout = timeout;
    return collect(std::move(work));
  } catch (const Error& error) {
    const Error told = error.at(rank_, call.name, number);
    core_->not_enqueued(flight, told);
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
    auto share = core_->extension->take();
    work->timeout = core_->extended(call.timeout, share);
    work->body = [core = core_.get(), operation = describe(call, flight_entry(call)), name = call.name,
                  timeout = work->timeout](WorkArk& running) mutable {
      operation.context = core->context(name, running.sequence, timeout);
      operation.descriptor.sequence = running.sequence;
      try {
        core->communicator->barrier(operation);
      } catch (const Error& error) {
        throw error.at(core->rank, name, running.sequence);
      }
    };
    core_->submit(work, call.async, flight_entry(call), std::move(share));
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
  auto work = enqueue(call, body, cuda);
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
