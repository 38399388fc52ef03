// The pieces of copy_engine.hpp.
#include "dma/copy_engine.hpp"

#include <algorithm>
#include <utility>

#include "error.hpp"

namespace ark {

namespace {

constexpr uint64_t kHead = 4096;  // of the words
constexpr int kSets = 3;
constexpr uint64_t kLeastPiece = 4 << 20;  // a smaller one costs more in hand-overs than it hides

}  // namespace

uint64_t CopyEngine::memory_bytes(int ranks, uint64_t limit) {
  constexpr uint64_t kMostSet = 64 << 20, kLeastSlot = 1 << 20;  // beyond, larger pieces gain nothing
  const uint64_t set = std::min(kMostSet, limit < kHead ? 0 : (limit - kHead) / kSets);
  return set / ranks < kLeastSlot ? 0 : kHead + kSets * set;
}

void CopyEngine::prepare(const DeviceMemory& own, int ranks) {
  CUstream stream = nullptr;
  check(driver().stream_create_with_priority(&stream, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority");
  const CUdeviceptr words = reinterpret_cast<CUdeviceptr>(own.data());
  for (Word which : {free_part, free_sum})
    driver().memset_d32_async(words + 4 * which * ranks * kSets, 1, static_cast<size_t>(ranks) * kSets, stream);
  const CUresult result = driver().stream_synchronize(stream);
  driver().stream_destroy(stream);
  check(result, "preparing memory for copy engines");
}

CopyEngine::CopyEngine(int rank, int device, std::vector<DeviceMemory> memory, uint64_t bytes,
                       device::EngineStatus* status)
    : rank_(rank),
      size_(static_cast<int>(memory.size())),
      device_(device),
      most_piece_((bytes - kHead) / kSets / memory.size() / 4096 * 4096),
      memory_(std::move(memory)),
      status_(status) {
  const RelaxedCapture relaxed;
  const CurrentContext context(device);
  int least = 0, greatest = 0;
  check(driver().ctx_get_stream_priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange");
  for (CUstream* stream : {&copy_, &add_, &release_})
    check(driver().stream_create_with_priority(stream, CU_STREAM_NON_BLOCKING, greatest), "cuStreamCreateWithPriority");
  check(driver().event_create(&event_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
}

CopyEngine::~CopyEngine() {
  try {
    const RelaxedCapture relaxed;
    const CurrentContext context(device_);
    driver().event_destroy(event_);
    for (CUstream stream : {copy_, add_, release_}) driver().stream_destroy(stream);
  } catch (const Error&) {  // at exit the driver may be gone already
  }
}

CUdeviceptr CopyEngine::word(int owner, Word which, int writer, int set) const {
  return reinterpret_cast<CUdeviceptr>(memory_[owner].data()) + 4 * ((which * size_ + writer) * kSets + set);
}

char* CopyEngine::slot(int owner, int source, int set) const {
  return memory_[owner].data() + kHead + (static_cast<uint64_t>(set) * size_ + source) * most_piece_;
}

void CopyEngine::Words::await(CUdeviceptr address) {
  add(CU_STREAM_MEM_OP_WAIT_VALUE_32, address, 1, CU_STREAM_WAIT_VALUE_EQ);
  add(CU_STREAM_MEM_OP_WRITE_VALUE_32, address, 0, CU_STREAM_WRITE_VALUE_DEFAULT);
}

void CopyEngine::Words::tell(CUdeviceptr address) {
  add(CU_STREAM_MEM_OP_WRITE_VALUE_32, address, 1, CU_STREAM_WRITE_VALUE_DEFAULT);
}

void CopyEngine::Words::add(CUstreamBatchMemOpType operation, CUdeviceptr address, uint32_t value, unsigned flags) {
  CUstreamBatchMemOpParams params{};
  params.waitValue.operation = operation;  // a write's parameters lie alike
  params.waitValue.address = address;
  params.waitValue.value = value;
  params.waitValue.flags = flags;
  operations_.push_back(params);
}

void CopyEngine::Words::enqueue() {
  if (operations_.empty()) return;
  check(driver().stream_batch_mem_op(stream_, static_cast<unsigned>(operations_.size()), operations_.data(), 0),
        "cuStreamBatchMemOp");
  operations_.clear();
}

void CopyEngine::copy(CUstream stream, void* to, const void* from, uint64_t bytes) {
  check(driver().memcpy_async(reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from), bytes, stream),
        "cuMemcpyAsync");
}

void CopyEngine::follow(CUstream stream, CUstream before) {
  check(driver().event_record(event_, before), "cuEventRecord");
  check(driver().stream_wait_event(stream, event_, 0), "cuStreamWaitEvent");
}

void CopyEngine::all_reduce(const void* in, void* out, uint64_t bytes, uint64_t element_bytes, CUstream stream,
                            const Add& add) {
  const CurrentContext context(device_);
  const uint64_t unit = std::max<uint64_t>(element_bytes, 16);
  const uint64_t units = (bytes + unit - 1) / unit, part = (units + size_ - 1) / size_ * unit;  // the last may be short
  const auto from_of = [&](int r) { return std::min(r * part, bytes); };
  const auto size_of = [&](int r) { return std::min(part, bytes - from_of(r)); };
  std::vector<int> others;
  for (int k = 1; k < size_; ++k) others.push_back((rank_ + k) % size_);

  const CUdeviceptr busy = reinterpret_cast<CUdeviceptr>(&status_->busy);
  check(driver().stream_write_value32(stream, busy, 1, CU_STREAM_WRITE_VALUE_DEFAULT), "cuStreamWriteValue32");
  for (CUstream own : {copy_, add_}) follow(own, stream);
  const uint64_t pieces = std::max((part + most_piece_ - 1) / most_piece_, std::min<uint64_t>(part / kLeastPiece, 2));
  const uint64_t piece = ((part + pieces - 1) / pieces + unit - 1) / unit * unit;
  const auto length = [&](int r, uint64_t i) { return std::min(piece, size_of(r) - std::min(size_of(r), i * piece)); };
  const auto at = [&](auto* base, int r, uint64_t i) {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(base)>>, const char, char>;
    return static_cast<Byte*>(base) + from_of(r) + i * piece;
  };
  Words copied(copy_), added(add_);
  const auto scatter = [&](uint64_t i) {
    const int set = static_cast<int>(i % kSets);
    for (int peer : others) {
      if (length(peer, i) == 0) continue;
      copied.await(word(rank_, free_part, peer, set));
      copied.enqueue();
      copy(copy_, slot(peer, rank_, set), at(in, peer, i), length(peer, i));
      copied.tell(word(peer, arrived_part, rank_, set));
    }
  };
  const auto add_up = [&](uint64_t i) {
    const int set = static_cast<int>(i % kSets);
    if (length(rank_, i) == 0) return;
    for (int peer : others) {
      added.await(word(rank_, arrived_part, peer, set));
      added.await(word(rank_, free_sum, peer, set));
    }
    added.enqueue();
    std::vector<const void*> parts(size_);
    for (int r = 0; r < size_; ++r) parts[r] = r == rank_ ? at(in, r, i) : slot(rank_, r, set);
    add(parts.data(), at(out, rank_, i), slot(rank_, rank_, set), length(rank_, i), add_);
    for (int peer : others) added.tell(word(peer, arrived_sum, rank_, set));
    for (int peer : others) added.tell(word(peer, free_part, rank_, set));
    added.enqueue();
  };
  const auto fetch = [&](uint64_t i) {
    const int set = static_cast<int>(i % kSets);
    for (int k = 1; k < size_; ++k) {
      const int owner = (rank_ + size_ - k) % size_;
      if (length(owner, i) == 0) continue;
      copied.await(word(rank_, arrived_sum, owner, set));
      copied.enqueue();
      // In place this overwrites what this stream has sent already: the sum was made from it.
      copy(copy_, at(out, owner, i), slot(owner, owner, set), length(owner, i));
      copied.tell(word(owner, free_sum, rank_, set));
    }
  };
  for (uint64_t i = 0; i <= pieces; ++i) {
    if (i < pieces) add_up(i);
    if (i < pieces) scatter(i);
    if (i > 0) fetch(i - 1);
    copied.enqueue();  // nothing is left untold while a full queue may stop the host
  }
  for (CUstream own : {copy_, add_}) follow(stream, own);
  check(driver().stream_write_value32(stream, busy, 0, CU_STREAM_WRITE_VALUE_DEFAULT), "cuStreamWriteValue32");
}

void CopyEngine::release_all() {
  const RelaxedCapture relaxed;
  const CurrentContext context(device_);
  driver().memset_d32_async(word(rank_, arrived_part, 0, 0), 1, static_cast<size_t>(kWords) * size_ * kSets, release_);
  driver().stream_synchronize(release_);
}

}  // namespace ark
