// From the description of an operation to its work: descriptor, flight record, profiler event, and the way it is run.
//
// The profiler's event covers all of issue(): a synchronous operation from beginning to end, the enqueueing of an
// asynchronous one. What only a listener needs is built when somebody listens.
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "process_group/process_group_ark.hpp"

namespace ark {

namespace {

// All tensors of an operation have one dtype, or (coalesced) the first stands for them; uint8 when there are none.
at::ScalarType dtype_of_all(const TensorArgument& inputs, const TensorArgument& outputs) {
  const at::Tensor* first = inputs.first();
  if (first == nullptr) first = outputs.first();
  return first == nullptr ? at::kByte : first->scalar_type();
}

bool reduces(Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter;
}

// Elements a rank, which all ranks must agree on.
uint64_t agreed_count(Kind kind, uint64_t inputs, uint64_t outputs) {
  if (kind == Kind::all_to_all) return 0;  // differ, and travel apart
  return kind == Kind::reduce_scatter || kind == Kind::scatter ? outputs : inputs;
}

}  // namespace

Operation ProcessGroupArk::describe(const Call& call, const FlightEntry& entry) const {
  Operation operation;
  operation.factor = call.reduction.factor;
  operation.descriptor.kind = call.kind;
  operation.descriptor.dtype = static_cast<DType>(entry.dtype);
  operation.descriptor.op = call.reduction.op;
  operation.descriptor.root = static_cast<int32_t>(call.root);
  operation.descriptor.count = agreed_count(call.kind, entry.input_elements, entry.output_elements);
  operation.descriptor.shape = call.shape;
  return operation;
}

ProcessGroupArk::WorkPtr ProcessGroupArk::issue(const Call& call, Body body) {
  if (const c10::Device device = device_of(call); device.is_cuda()) return issue_cuda(call, std::move(body), device);
  const CommsRecord event(comms(), [&] { return comms_call(call); });
  const FlightEntry entry = flight_entry(call);
  auto work = make_work(call.type, call.name, call.outputs.flat());
  auto share = core_->extension->take();
  work->timeout = core_->extended(call.timeout, share);
  work->body = [core = core_.get(), operation = describe(call, entry), name = call.name, timeout = work->timeout,
                body = std::move(body)](WorkArk& running) mutable {
    operation.context = core->context(name, running.sequence, timeout);
    operation.descriptor.sequence = running.sequence;
    try {
      body(*core->communicator, operation);
    } catch (const Error& error) {
      throw error.at(core->rank, name, running.sequence);
    }
  };
  core_->submit(work, call.async, entry, std::move(share));
  return collect(work);
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
  const auto work = issue(call, [body = std::move(body)](Communicator& group, Operation& op) { body(group, op); });
  work->wait();
}

c10::intrusive_ptr<WorkArk> ProcessGroupArk::make_work(c10d::OpType type, const char* name, Tensors outputs) {
  auto work = c10::make_intrusive<WorkArk>(rank_, type, std::move(outputs), core_->executor);
  work->name = name;
  work->group_timeout = std::chrono::milliseconds(core_->timeout_ms.load(std::memory_order_relaxed));
  work->on_abort = [core = core_] { core->abort("the work was aborted"); };
  return work;
}

FlightEntry ProcessGroupArk::flight_entry(const Call& call) const {
  const at::ScalarType dtype = dtype_of_all(call.inputs, call.outputs);
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

CommsCall ProcessGroupArk::comms_call(const Call& call) const {
  const int64_t inputs = call.inputs.elements(), outputs = call.outputs.elements();
  return {.name = call.event,
          .title = call.name,
          .sequence = static_cast<int64_t>(core_->sequence.load(std::memory_order_relaxed)) + 1,
          .rank = call.root >= 0 ? static_cast<int>(call.root) : rank_,
          .inputs = call.inputs.value(),
          .outputs = call.outputs.value(),
          // On every rank what the root holds, as with NCCL.
          .input_elements = call.kind == Kind::scatter ? outputs * size_ : inputs,
          .output_elements = call.kind == Kind::gather ? inputs * size_ : outputs,
          .dtype = dtype_of_all(call.inputs, call.outputs),
          .input_splits = call.input_splits,
          .output_splits = call.output_splits,
          .async = call.async};
}

const CommsGroup& ProcessGroupArk::comms() {
  std::lock_guard lock(mutex_);
  if (!comms_ready_) {
    comms_.name = {pg_uid_, pg_desc_};
    comms_.rank = rank_;
    comms_.size = size_;
    c10d::getGlobalRankStartAndStride(options_->global_ranks_in_group, comms_.global_rank_start,
                                      comms_.global_rank_stride);
    // PyTorch tells the description only after the group was made, through a function that is not virtual.
    FlightRecord::instance().describe_group(core_->flight_group, pg_uid_.empty() ? core_->name : pg_uid_, pg_desc_);
    comms_ready_ = true;
  }
  return comms_;
}

}  // namespace ark
