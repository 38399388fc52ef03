// Turns a method's call into an operation record and a work, on the host or on a CUDA device.
//
// The profiler's event covers all of a synchronous operation and the enqueueing of an asynchronous one; data for
// listeners is only built if there are any. On a device, a barrier first waits on the host, after operations on CPU
// tensors, then for the device. Messages have a line per peer and direction; tags are ignored, as with NCCL.
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "collectives/cuda/tile_memory.hpp"
#include "process_group/cuda/cuda_group.hpp"
#include "process_group/cuda/work_cuda.hpp"
#include "process_group/process_group_ark.hpp"

namespace ark {

namespace {

bool reduces(Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter;
}

// The per-rank element count on which all ranks must agree.
uint64_t agreed_count(Kind kind, uint64_t inputs, uint64_t outputs) {
  if (kind == Kind::all_to_all) return 0;  // counts differ and travel separately
  return kind == Kind::reduce_scatter || kind == Kind::scatter ? outputs : inputs;
}

}  // namespace

CallSite ProcessGroupArk::site(const char* operation) const {
  core_->check_open(operation);
  return {rank_, operation};
}

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

void ProcessGroupArk::describe(const Call& call, Body body, const FlightEntry& entry,
                               OperationRecord& operation) const {
  operation.type = call.type;
  operation.context.name = call.name;
  operation.factor = call.reduction.factor;
  operation.captured_step = captures_step_.load(std::memory_order_relaxed);
  operation.descriptor.kind = call.kind;
  operation.descriptor.dtype = static_cast<DType>(entry.dtype);
  operation.descriptor.op = call.reduction.op;
  operation.descriptor.root = static_cast<int32_t>(call.root);
  operation.descriptor.count = agreed_count(call.kind, entry.input_elements, entry.output_elements);
  operation.descriptor.shape = call.shape;
  operation.even = call.even;
  operation.held = {std::move(body), core_->extension->take()};
  operation.asked = core_->extended(call.timeout, operation.held.second);
}

FlightEntry ProcessGroupArk::flight_entry(const Call& call) const {
  const at::ScalarType dtype = call.dtype();
  FlightEntry entry;
  entry.operation = call.name;
  entry.root = static_cast<int32_t>(call.root);
  entry.dtype = static_cast<int8_t>(dtype_of(dtype));
  entry.reduce_op = reduces(call.kind) ? static_cast<int8_t>(call.reduction.op) : -1;
  entry.timeout_ms = call.timeout.count() > 0 ? call.timeout.count() : core_->timeout_ms.load();
  const auto note = [](const TensorArgument& tensors, FlightSizes& sizes, uint64_t& elements) {
    tensors.for_each([&](const at::Tensor& tensor) {
      sizes.add(tensor.sizes().data(), tensor.dim());
      elements += tensor.numel();
    });
  };
  note(call.inputs, entry.inputs, entry.input_elements);
  note(call.outputs, entry.outputs, entry.output_elements);
  entry.input_bytes = entry.input_elements * c10::elementSize(dtype);
  return entry;
}

const CommsGroup& ProcessGroupArk::comms() {
  std::lock_guard lock(mutex_);
  if (!comms_ready_) {
    comms_.name = {pg_uid_, pg_desc_};
    comms_.rank = rank_;
    comms_.size = size_;
    c10d::getGlobalRankStartAndStride(options_->global_ranks_in_group, comms_.global_rank_start,
                                      comms_.global_rank_stride);
    // PyTorch sets the description after construction, through a function that is not virtual.
    FlightRecord::instance().describe_group(core_->flight_group, pg_uid_.empty() ? core_->name : pg_uid_, pg_desc_);
    comms_ready_ = true;
  }
  return comms_;
}

ProcessGroupArk::WorkPtr ProcessGroupArk::collect(WorkPtr work) {
  if (coalescing_threads_.load(std::memory_order_relaxed) == 0) return work;
  std::lock_guard lock(mutex_);
  if (const auto found = coalescing_.find(std::this_thread::get_id()); found != coalescing_.end()) {
    found->second.works.push_back(work);
  }
  return work;
}

c10::intrusive_ptr<WorkArk> ProcessGroupArk::make_work(c10d::OpType type, const char* name, Tensors outputs) {
  return c10::make_intrusive<WorkArk>(core_, type, name, std::move(outputs));
}

ProcessGroupArk::WorkPtr ProcessGroupArk::issue(const Call& call, Body body) {
  if (const c10::Device device = device_of(call); device.is_cuda()) {
    const auto cuda = cuda_side(call.name, device);
    const bool by_nodes = cuda->nodes() && call.carry && NodesCommunicator::takes(call.kind, call.even);
    if (cuda->carrier && !by_nodes) return carry_cuda(call, *cuda);
    if (cuda->nccl) meet_for_nccl(call, *cuda);
    return collect(enqueue(call, std::move(body), cuda));
  }
  const CommsRecord event(comms(), call, core_->sequence.load(std::memory_order_relaxed) + 1);
  return collect(run_on_host(call, std::move(body)));
}

c10::intrusive_ptr<WorkArk> ProcessGroupArk::run_on_host(const Call& call, Body body) {
  auto work = make_work(call.type, call.name, call.outputs.flat());
  FlightEntry entry = flight_entry(call);
  describe(call, std::move(body), entry, work->operation);
  core_->executor->submit(work, call.async, *core_, entry);
  return work;
}

void ProcessGroupArk::run_fused(const char* name, const at::Tensor& result, uint64_t fingerprint, FusedBody body) {
  site(name);
  Call call{.type = c10d::OpType::UNKNOWN,
            .kind = Kind::all_to_all,
            .name = name,
            .event = name,
            .timeout = c10d::kUnsetTimeout,
            .async = false,
            .outputs = result};
  call.shape = fingerprint;
  issue(call, std::move(body))->wait();
}

c10::intrusive_ptr<CudaWork> ProcessGroupArk::enqueue(const Call& call, Body body,
                                                      const std::shared_ptr<CudaGroup>& cuda) {
  const CommsRecord event(comms(), call, core_->sequence.load(std::memory_order_relaxed) + 1);
  return enqueue_on(CudaGroup::kCollectives, 0, call, std::move(body), cuda, flight_entry(call));
}

c10::intrusive_ptr<CudaWork> ProcessGroupArk::enqueue_on(int line, uint64_t message, const Call& call, Body body,
                                                         const std::shared_ptr<CudaGroup>& cuda, FlightEntry entry) {
  const auto operation = std::make_shared<OperationRecord>();
  describe(call, std::move(body), entry, *operation);
  operation->context.sequence = operation->descriptor.sequence = message;
  try {
    cuda->enqueue(operation, {line, call.async, core_->timing.load(std::memory_order_relaxed)}, *core_, entry);
    if (!told_of_engines_.load(std::memory_order_relaxed)) {
      const auto communicator = cuda->communicator();
      if (const std::string why = communicator ? communicator->engine_refusal() : ""; !why.empty())
        tell_of_engines(why);
    }
    if (cuda->nccl) tell_of_nccl(*cuda->nccl);
    auto work = c10::make_intrusive<CudaWork>(core_, cuda, call.type, call.name, call.outputs.flat(),
                                              CudaWork::Parts{operation});
    work->timeout = operation->asked;
    return work;
  } catch (const Error& error) {
    const Error told = error.at(rank_, call.name, operation->sequence());
    core_->not_enqueued(operation->flight, told);
    throw told;
  }
}

// The log may wait for the GIL, so no lock is held here.
void ProcessGroupArk::tell_of_engines(const std::string& why) {
  if (told_of_engines_.exchange(true) || rank_ != 0 || !options_->log) return;
  options_->log("group \"" + options_->group_name + "\" of " + std::to_string(size_) +
                " ranks: kernels move what copy engines would, which share no memory: " + why);
}

void ProcessGroupArk::tell_of_nccl(NcclEntry& nccl) {
  const auto lines = nccl.news();
  if (rank_ != 0 || !options_->log) return;
  for (const std::string& line : lines)
    options_->log("group \"" + options_->group_name + "\" of " + std::to_string(size_) + " ranks: " + line);
}

bool ProcessGroupArk::launch_region(const char* name, c10::Device device, RegionLaunch launch) {
  site(name);
  const auto cuda = cuda_side(name, device);
  if (cuda->carrier) return false;
  enqueue_region(name, cuda, [&](Communicator&, Operation& operation) {
    if (const auto communicator = cuda->communicator()) launch(*communicator, operation);
  });
  return true;
}

bool ProcessGroupArk::launch_over_nodes(const char* name, c10::Device device, NodesLaunch launch) {
  site(name);
  const auto cuda = cuda_side(name, device);
  if (!cuda->nodes()) return false;
  enqueue_region(name, cuda, [&](Communicator&, Operation& operation) {
    if (const auto nodes = cuda->nodes()) launch(*nodes, operation);
  });
  return true;
}

void ProcessGroupArk::enqueue_region(const char* name, const std::shared_ptr<CudaGroup>& cuda, const Body& body) {
  Call call{};
  call.type = c10d::OpType::UNKNOWN;
  call.name = call.event = name;
  call.timeout = c10d::kUnsetTimeout;
  enqueue(call, body, cuda);
}

int ProcessGroupArk::regions_over_nodes(std::string& why) const {
  if (core_->shm) return 1;
  if (!core_->plan) return why = "its ranks share no memory", 0;
  const NodePlan& plan = *core_->plan;
  if (!core_->rdma || options_->net != rdma::Wish::rdma)
    why = "no RDMA between them (ARK_NET=rdma)";
  else if (const std::string shape = BetweenStage::why_not(plan); !shape.empty())
    why = shape;
  else if (const std::string uneven = BetweenStage::no_regions(plan); !uneven.empty())
    why = uneven;
  else if (!plan.flat() && (options_->sums.flat || options_->sums.input_partials))
    why = "sums in another order than that of nodes with float32 partials (ARK_ORDER, ARK_PARTIALS)";
  return why.empty() ? plan.nodes() : 0;
}

void ProcessGroupArk::check_region(const char* name, c10::Device device) {
  const auto cuda = cuda_side(name, device);
  try {
    cuda->check(core_->context(name, 0, c10d::kUnsetTimeout));
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
  constexpr size_t kMost = 4096;  // number of shapes; all ranks drop the cache at the same call
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

ProcessGroupArk::WorkPtr ProcessGroupArk::transfer_cuda(const Call& call, const FlightEntry& entry, uint64_t number) {
  const auto cuda = cuda_side(call.name, device_of(call));
  if (cuda->carrier) return carry_cuda(call, *cuda);
  const at::Tensor& tensor = *call.inputs.first();
  const int peer = call.peer;
  const size_t bytes = tensor.nbytes();
  const bool is_send = call.type == c10d::OpType::SEND;
  Body body;
  if (is_send) {
    body = [source = Input(tensor), bytes, peer](Communicator& group, Operation& op) {
      static_cast<CudaCommunicator&>(group).send(op, source.data(), bytes, peer);
    };
  } else {
    body = [target = Output({rank_, call.name}, "tensor", tensor), bytes, peer](Communicator& group,
                                                                                Operation& op) mutable {
      static_cast<CudaCommunicator&>(group).recv(op, target.data(), bytes, peer);
      target.commit();
    };
  }
  auto work = enqueue_on(CudaGroup::line_of(peer, is_send), number, call, std::move(body), cuda, entry);
  work->source_rank = peer;
  return collect(std::move(work));
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
  WorkPtr on_host;
  if (!is_capturing(device)) {
    on_host = run_on_host(call, body);  // after operations on CPU tensors
    if (!call.async) on_host->wait();
  }
  if (cuda->carrier && !cuda->nodes()) {
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
  // Reduced on the host in rank order, like any other sum, because adding rows on a device is not reproducible. This
  // blocks the host even if asynchronous, but so do sizes that only the device knows.
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
