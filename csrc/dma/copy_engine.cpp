// Memory, words and streams of copy_engine.hpp, and what the watching thread asks.
#include "dma/copy_engine.hpp"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "error.hpp"
#include "protocol/atomics.hpp"

namespace ark {

namespace {

constexpr uint64_t kHead = 4096;           // of the words
constexpr uint64_t kLeastPiece = 4 << 20;  // a smaller one costs more in hand-overs than it hides
constexpr std::chrono::milliseconds kReleasing{60}, kPatience{1000};

}  // namespace

// Of parts and of messages from each peer, and of sums.
uint64_t CopyEngine::slot_count(int ranks) {
  return static_cast<uint64_t>(kSlots) * (2 * std::max(ranks - 1, 1) + 1);
}

uint64_t CopyEngine::memory_bytes(int ranks, uint64_t limit) {
  constexpr uint64_t kMost = 384 << 20, kLeastSlot = 1 << 20;  // beyond, larger pieces gain little
  const uint64_t slots = slot_count(ranks);
  const uint64_t slot = std::min(kMost, limit < kHead ? 0 : limit - kHead) / slots / 4096 * 4096;
  return slot < kLeastSlot ? 0 : kHead + slots * slot;
}

void CopyEngine::prepare(char* own, int ranks) {
  CUstream stream = nullptr;
  check(driver().stream_create_with_priority(&stream, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority");
  const CUdeviceptr words = reinterpret_cast<CUdeviceptr>(own);
  const size_t count = static_cast<size_t>(ranks) * kSlots;
  driver().memset_d32_async(words + 4 * free_slot * count, 1, (entered - free_slot) * count, stream);
  const CUresult result = driver().stream_synchronize(stream);
  driver().stream_destroy(stream);
  check(result, "preparing memory for copy engines");
}

CopyEngine::CopyEngine(int rank, int device, std::vector<char*> memory, uint64_t bytes, device::EngineStatus* status,
                       device::EngineStatus* host_status, std::shared_ptr<void> held)
    : rank_(rank),
      size_(static_cast<int>(memory.size())),
      device_(device),
      slot_bytes_((bytes - kHead) / slot_count(static_cast<int>(memory.size())) / 4096 * 4096),
      memory_(std::move(memory)),
      held_(std::move(held)),
      status_(status),
      host_status_(host_status) {
  const RelaxedCapture relaxed;
  const CurrentContext context(device);
  int least = 0, greatest = 0;
  check(driver().ctx_get_stream_priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange");
  const auto create = [](CUstream& stream, int priority) {
    check(driver().stream_create_with_priority(&stream, CU_STREAM_NON_BLOCKING, priority),
          "cuStreamCreateWithPriority");
  };
  create(link_, greatest);
  for (CUstream& stream : work_) create(stream, greatest);
  create(release_, least);
  void* seen = nullptr;
  check(driver().mem_host_alloc(&seen, sizeof *seen_ * kWords * size_ * kSlots, kHostAllocPortable), "cuMemHostAlloc");
  seen_ = static_cast<uint32_t*>(seen);
  check(driver().event_create(&event_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  for (CUevent& event : done_) check(driver().event_create(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
}

CopyEngine::~CopyEngine() {
  try {
    const RelaxedCapture relaxed;
    const CurrentContext context(device_);
    driver().event_destroy(event_);
    for (CUevent event : done_) driver().event_destroy(event);
    for (CUstream stream : work_) driver().stream_destroy(stream);
    for (CUstream stream : {link_, release_}) driver().stream_destroy(stream);
    driver().mem_free_host(seen_);
  } catch (const Error&) {  // at exit the driver may be gone already
  }
}

CUdeviceptr CopyEngine::word(int waiter, Word which, int teller, uint64_t piece) const {
  return reinterpret_cast<CUdeviceptr>(memory_[waiter]) + 4 * ((which * size_ + teller) * kSlots + piece % kSlots);
}

char* CopyEngine::slot(int owner, Bank bank, int writer, uint64_t piece) const {
  const int column = writer < owner || bank == sums ? writer : writer - 1;
  if (bank == sums) return memory_[owner] + kHead + (2 * kSlots * (size_ - 1) + piece % kSlots) * slot_bytes_;
  return memory_[owner] + kHead + (((bank * kSlots) + piece % kSlots) * (size_ - 1) + column) * slot_bytes_;
}

void CopyEngine::copy(CUstream stream, void* to, const void* from, uint64_t bytes) {
  check(driver().memcpy_async(reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from), bytes, stream),
        "cuMemcpyAsync");
}

void CopyEngine::follow(CUstream stream, CUstream before) {
  check(driver().event_record(event_, before), "cuEventRecord");
  check(driver().stream_wait_event(stream, event_, 0), "cuStreamWaitEvent");
}

// Equal pieces of whole units: as many as are wanted, but not too small ones, and more where they must fit into slots.
uint64_t CopyEngine::piece_of(uint64_t bytes, uint64_t unit, uint64_t wanted, bool slots) const {
  const uint64_t least = slots ? (bytes + slot_bytes_ - 1) / slot_bytes_ : 1;
  const uint64_t count = std::max({least, std::min(bytes / kLeastPiece, wanted), uint64_t{1}});
  return std::max(((bytes + count - 1) / count + unit - 1) / unit, uint64_t{1}) * unit;
}

// That its stream has done all it was given; waits for that a while.
bool CopyEngine::released() const {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  for (;;) {
    const CUresult result = driver().stream_query(release_);
    if (result != CUDA_ERROR_NOT_READY) return result == CUDA_SUCCESS;
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void CopyEngine::release_all() {
  const RelaxedCapture relaxed;
  const CurrentContext context(device_);
  const size_t count = static_cast<size_t>(size_) * kSlots;
  if (!released()) return;
  const auto until = std::chrono::steady_clock::now() + kReleasing;
  do {  // a stream may have many calls before it
    const uint32_t mark = protocol::load_relaxed(host_status_->expected) & kMarkBits;
    driver().memset_d32_async(word(rank_, arrived, 0, 0), 1, entered * count, release_);
    driver().memset_d32_async(word(rank_, entered, 0, 0), mark, count, release_);
    if (!released()) return;
  } while (protocol::load_relaxed(host_status_->busy) != 0 && std::chrono::steady_clock::now() < until);
}

EngineDiagnosis CopyEngine::diagnose() {
  const RelaxedCapture relaxed;
  const CurrentContext context(device_);
  const size_t bytes = sizeof *seen_ * kWords * size_ * kSlots;
  if (!released() ||
      driver().memcpy_async(reinterpret_cast<CUdeviceptr>(seen_), word(rank_, arrived, 0, 0), bytes, release_) !=
          CUDA_SUCCESS ||
      !released())
    return {};
  const uint32_t expected = protocol::load_relaxed(host_status_->expected), asked = expected >> kMarkShift;
  const auto count_of = [&](Word which, int peer) {
    const uint32_t* const first = &seen_[(which * size_ + peer) * kSlots];
    return std::count_if(first, first + kSlots, [](uint32_t value) { return value != 0; });
  };
  // Missing is from whom nothing lies here that would wait to be used, first of all where what it got was not used.
  std::vector<int> silent, idle;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const uint32_t mark = seen_[(entered * size_ + peer) * kSlots];
    if ((asked >> peer & 1) != 0 && mark != 0 && mark != (expected & kMarkBits)) return {peer, true};
    if (count_of(arrived, peer) + count_of(came, peer) != 0) continue;
    silent.push_back(peer);
    if (count_of(free_slot, peer) + count_of(taken, peer) != 2 * kSlots) idle.push_back(peer);
  }
  if (idle.size() == 1) return {idle[0], false};
  return {silent.size() == 1 ? silent[0] : -1, false};
}

}  // namespace ark
