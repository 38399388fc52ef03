// Collectives by copy engines (copy_engine/copy_engine.hpp): shares their memory at the first large operation, launches
// the kernel that adds, and exchanges where registered outputs are.
#include <algorithm>
#include <memory>
#include <utility>

#include "collectives/cuda/cuda_communicator.hpp"
#include "cuda/add.cuh"
#include "shm/shared_pinned_memory.hpp"
#include "shm/symmetric_memory.hpp"

namespace ark {

namespace {

// The memory that an engine and graphs with its calls use.
struct EngineMemory {
  std::vector<DeviceMemory> slots;
  std::unique_ptr<SharedPinnedMemory> words;
};

// Computes a mark (copy_engine/copy_engine.hpp) of its inputs.
class Hash {
 public:
  Hash& operator<<(uint64_t value) {
    state_ = (state_ ^ value) * 0x9e3779b97f4a7c15u;
    state_ ^= state_ >> 29;
    return *this;
  }
  uint32_t value() const { return std::max(static_cast<uint32_t>(state_ >> 16) & CopyEngine::kMarkBits, uint32_t{1}); }

 private:
  uint64_t state_ = 1;
};

}  // namespace

// Returns null during capture, when memory cannot be shared, and for good once sharing was refused. All ranks agree,
// because their calls do.
CopyEngine* CudaCommunicator::copy_engine(const Operation& operation) {
  if (engine_ || engine_refusal_) return engine_.get();
  CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
  ark::check(driver().stream_is_capturing(stream_of(operation), &capturing), "cuStreamIsCapturing");
  if (capturing != CU_STREAM_CAPTURE_STATUS_NONE) return nullptr;
  SymmetricMemory::Options sharing;
  sharing.device = device_, sharing.device_each = device_each_;
  sharing.bytes = CopyEngine::memory_bytes(size_, dispatch_.buffer_bytes);
  std::string why;
  const auto refused = [&]() -> CopyEngine* {
    engine_refusal_ = why;
    engine_refused_.store(true, std::memory_order_release);
    return nullptr;
  };
  if (sharing.bytes == 0) return refused();
  const auto meeting =
      MemoryMeeting::join(*store_, {rank_, size_, timeout_, "buckets", ends_with(health_, timeout_)}, why);
  if (!meeting) return refused();
  const auto shared = std::make_shared<EngineMemory>();
  shared->slots = SymmetricMemory::create(*meeting, sharing, why);
  if (shared->slots.empty()) return refused();
  shared->words = SharedPinnedMemory::create(
      *meeting, device_, CopyEngine::words_bytes(size_),
      [&](void* own) { CopyEngine::prepare(static_cast<uint32_t*>(own), rank_, size_); }, why);
  if (!shared->words) return refused();
  std::vector<char*> memory;
  CopyEngine::Words words;
  for (int r = 0; r < size_; ++r) {
    memory.push_back(shared->slots[r].data());
    words.of.push_back(shared->words->device(r));
    words.host.push_back(static_cast<uint32_t*>(shared->words->host(r)));
  }
  engine_ = std::make_unique<CopyEngine>(rank_, device_, std::move(memory), sharing.bytes, std::move(words),
                                         &device_status()->engine, &host_status()->engine, shared);
  engine_->in_line_to = dispatch_.in_line_to;
  shared_bytes_ += shared->slots[rank_].size();
  watch_.watch_engine(
      &host_status()->engine, [this] { engine_->release_all(); }, [this] { return engine_->diagnose(); });
  return engine_.get();
}

CopyEngine::Add CudaCommunicator::adding(const Operation& operation) {
  const jit::Kernel* const kernel =
      &this->kernel(GroupKernel::add, rule_of(operation.descriptor.dtype, operation.descriptor.op));
  return [this, &operation, kernel](const void* const* parts, void* sum, void* handed_out, uint64_t bytes,
                                    CUstream stream) {
    device::AddParams params{};
    std::copy_n(parts, size_, params.parts);
    params.out = sum;
    params.handed_out = handed_out;
    params.bytes = bytes;
    params.progress = &device_status()->engine.progress;
    describe_reduction(operation, params);
    const uint64_t each = 256 * device::kAddUnits * 16;
    jit::launch(*kernel, {static_cast<unsigned>((bytes + each - 1) / each)}, {256}, 0, stream, params);
  };
}

// outs: this rank's outputs of `bytes` each, by source rank. own: index of the output where every rank stores this
// rank's message.
CudaCommunicator::Marked CudaCommunicator::marked(const Operation& operation, void* const* outs, int count,
                                                  uint64_t bytes, int own) const {
  Marked made;
  if (windows_.size() == 0) return made;
  Hash plain;
  plain << static_cast<uint64_t>(operation.descriptor.kind) << bytes
        << static_cast<uint64_t>(operation.descriptor.root);
  Hash hash = plain;
  uint32_t id = 0;
  for (int i = 0; i < count; ++i) {
    const auto window = windows_.find(outs[i], bytes);
    if (!window || (i > 0 && window->id != id)) {
      made.outputs.at.clear();
      break;
    }
    id = window->id;
    hash << id << window->offset;
    if (i != own) continue;
    for (int r = 0; r < size_; ++r) made.outputs.at.push_back(window->base[r] + window->offset);
  }
  made.outputs.mark = (made.outputs.at.empty() ? plain : hash).value();
  return made;
}

bool CudaCommunicator::engine_all_reduce(const Operation& operation, const void* in, void* out, uint64_t bytes) {
  CopyEngine* const engine = copy_engine(operation);
  if (engine == nullptr) return false;
  watch_.engine_used(operation.context.timeout);
  const Marked outputs = marked(operation, &out, 1, bytes, 0);
  engine->all_reduce(in, out, bytes, size_of(operation.descriptor.dtype), stream_of(operation), adding(operation),
                     outputs.given());
  return true;
}

bool CudaCommunicator::engine_reduce_scatter(const Operation& operation, const void* const* ins, void* out,
                                             uint64_t bytes) {
  CopyEngine* const engine = copy_engine(operation);
  if (engine == nullptr) return false;
  watch_.engine_used(operation.context.timeout);
  engine->reduce_scatter(ins, out, bytes, size_of(operation.descriptor.dtype), stream_of(operation), adding(operation));
  return true;
}

bool CudaCommunicator::engine_all_gather(const Operation& operation, const void* in, void* const* outs,
                                         uint64_t bytes) {
  CopyEngine* const engine = copy_engine(operation);
  if (engine == nullptr) return false;
  watch_.engine_used(operation.context.timeout);
  const Marked outputs = marked(operation, outs, size_, bytes, rank_);
  CopyEngine::Message sends[device::kMaxRanks];
  CopyEngine::Place receives[device::kMaxRanks];
  for (int r = 0; r < size_; ++r) sends[r] = {in, bytes}, receives[r] = {outs[r], bytes};
  engine->move(sends, receives, true, stream_of(operation), outputs.given());
  return true;
}

bool CudaCommunicator::engine_broadcast(const Operation& operation, void* data, uint64_t bytes) {
  CopyEngine* const engine = copy_engine(operation);
  if (engine == nullptr) return false;
  watch_.engine_used(operation.context.timeout);
  const Marked outputs = marked(operation, &data, 1, bytes, 0);
  engine->broadcast(data, bytes, operation.descriptor.root, stream_of(operation), outputs.given());
  return true;
}

// Only a message's two ranks know that it is large, so this cannot create the memory: it must exist already.
void CudaCommunicator::engine_all_to_all(const Operation& operation, device::MoveParams& messages, uint64_t from) {
  if (engine_ == nullptr) return;
  CopyEngine::Message sends[device::kMaxRanks] = {};
  CopyEngine::Place receives[device::kMaxRanks] = {};
  bool any = false;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    if (messages.send_bytes[r] >= from) sends[r] = {messages.send[r], std::exchange(messages.send_bytes[r], 0)};
    if (messages.receive_bytes[r] >= from)
      receives[r] = {messages.receive[r], std::exchange(messages.receive_bytes[r], 0)};
    any = any || sends[r].bytes != 0 || receives[r].bytes != 0;
  }
  if (!any) return;
  watch_.engine_used(operation.context.timeout);
  const Marked outputs = marked(operation, nullptr, 0, 0, 0);
  engine_->move(sends, receives, false, stream_of(operation), outputs.given());
}

}  // namespace ark
