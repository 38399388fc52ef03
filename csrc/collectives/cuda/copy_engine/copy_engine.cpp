// Memory, words and streams of the copy engines, and diagnosis for the watching thread.
#include "collectives/cuda/copy_engine/copy_engine.hpp"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "protocol/atomics.hpp"
#include "util/error.hpp"

namespace ark {

namespace {

constexpr uint64_t kHead = 4096;                               // scratch for a graph to copy its beat through
constexpr uint64_t kLeastPiece = 4 << 20;                      // smaller pieces cost more in hand-overs than they hide
constexpr std::chrono::milliseconds kReleasing{60}, kIdle{2};  // also covers the idle time between two calls
constexpr std::chrono::microseconds kBetween{50};

}  // namespace

// Slots for parts and for messages from each peer, and for sums.
uint64_t CopyEngine::slot_count(int ranks) {
  return static_cast<uint64_t>(slots_of(ranks)) * (2 * std::max(ranks - 1, 1) + 1);
}

uint64_t CopyEngine::memory_bytes(int ranks, uint64_t limit) {
  constexpr uint64_t kMost = 384 << 20, kLeastSlot = 1 << 20;  // beyond this, larger pieces gain little
  const uint64_t slots = slot_count(ranks);
  const uint64_t slot = std::min(kMost, limit < kHead ? 0 : limit - kHead) / slots / 4096 * 4096;
  return slot < kLeastSlot ? 0 : kHead + slots * slot;
}

size_t CopyEngine::words_bytes(int ranks) {
  constexpr size_t kPage = 4096;
  return (sizeof(uint32_t) * kWords * ranks * kSlots + kPage - 1) / kPage * kPage;
}

void CopyEngine::prepare(uint32_t* own, int rank, int ranks) {
  std::fill(own + place_of(free_slot, 0, 0, ranks), own + place_of(turn, 0, 0, ranks), 1);
  own[place_of(turn, (rank + 1) % ranks, 0, ranks)] = 1;
}

CopyEngine::CopyEngine(int rank, int device, std::vector<char*> memory, uint64_t bytes, Words words,
                       device::EngineStatus* status, device::EngineStatus* host_status, std::shared_ptr<void> held)
    : rank_(rank),
      size_(static_cast<int>(memory.size())),
      device_(device),
      slots_(slots_of(size_)),
      slot_bytes_((bytes - kHead) / slot_count(static_cast<int>(memory.size())) / 4096 * 4096),
      memory_(std::move(memory)),
      words_(std::move(words)),
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
  for (CUstream* stream : {&link_, &awaiting_, &telling_}) create(*stream, greatest);
  for (CUstream& stream : work_) create(stream, greatest);
  const auto create_event = [](CUevent& event) {
    check(driver().event_create(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  };
  create_event(event_), create_event(idle_);
  for (CUevent& event : done_) create_event(event);
}

CopyEngine::~CopyEngine() {
  try {
    const RelaxedCapture relaxed;
    const CurrentContext context(device_);
    for (CUevent event : {event_, idle_}) driver().event_destroy(event);
    for (CUevent event : done_) driver().event_destroy(event);
    for (CUstream stream : work_) driver().stream_destroy(stream);
    for (CUstream stream : {link_, awaiting_, telling_}) driver().stream_destroy(stream);
  } catch (const Error&) {  // at exit the driver may be gone
  }
}

CUdeviceptr CopyEngine::word(int waiter, Word which, int teller, uint64_t piece) const {
  return words_.of[waiter] + sizeof(uint32_t) * place_of(which, teller, piece % slots_, size_);
}

char* CopyEngine::slot(int owner, Bank bank, int writer, uint64_t piece) const {
  const int column = writer < owner || bank == sums ? writer : writer - 1;
  if (bank == sums) return memory_[owner] + kHead + (2 * slots_ * (size_ - 1) + piece % slots_) * slot_bytes_;
  return memory_[owner] + kHead + (((bank * slots_) + piece % slots_) * (size_ - 1) + column) * slot_bytes_;
}

void CopyEngine::copy(CUstream stream, void* to, const void* from, uint64_t bytes) {
  check(driver().memcpy_async(reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from), bytes, stream),
        "cuMemcpyAsync");
}

void CopyEngine::follow(CUstream stream, CUstream before) {
  if (stream == before) return;
  check(driver().event_record(event_, before), "cuEventRecord");
  check(driver().stream_wait_event(stream, event_, 0), "cuStreamWaitEvent");
}

// Equal pieces of whole units: `wanted` of them, fewer if they would be too small, more if they must fit into slots.
uint64_t CopyEngine::piece_of(uint64_t bytes, uint64_t unit, uint64_t wanted, bool slots) const {
  const uint64_t least = slots ? (bytes + slot_bytes_ - 1) / slot_bytes_ : 1;
  const uint64_t count = std::max({least, std::min(bytes / kLeastPiece, wanted), uint64_t{1}});
  return std::max(((bytes + count - 1) / count + unit - 1) / unit, uint64_t{1}) * unit;
}

// Relaxed accesses suffice, because released streams read garbage anyway.
void CopyEngine::release_all() {
  using Clock = std::chrono::steady_clock;
  const size_t marks = place_of(entered, 0, 0, size_), end = place_of(kWords, 0, 0, size_);
  auto now = Clock::now(), busy_at = now;
  const auto until = now + kReleasing;
  for (;;) {
    const uint32_t mark = protocol::load_relaxed(host_status_->expected) & kMarkBits;
    for (size_t i = 0; i < end; ++i) protocol::store_relaxed(words_.host[rank_][i], i < marks ? 1 : mark);
    if (protocol::load_relaxed(host_status_->busy) != 0) busy_at = now;
    if (now > until || now - busy_at > kIdle) return;
    std::this_thread::sleep_for(kBetween);
    now = Clock::now();
  }
}

// A rank that has not called still holds its initial turn, to send to the next rank. All other initial turns were used
// and cannot return without it, except that of the rank before it, to send to the missing one. In calls without turns,
// all of them lie unused.
int CopyEngine::unused_turn() const {
  const auto unused = [&](int r) {
    return protocol::load_acquire(words_.host[r][place_of(turn, (r + 1) % size_, 0, size_)]) != 0;
  };
  int count = 0, found = -1;
  for (int r = 0; r < size_; ++r) {
    if (!unused(r)) continue;
    ++count;
    if (!unused((r + 1) % size_)) found = r;
  }
  return count == 1 || (count == 2 && unused(before(found))) ? found : -1;
}

// A stream sets `expected` after it has consumed all earlier marks, and clears it before a peer can send the next mark.
// So if `expected` is the same before and after, the words read here belong to the same call.
EngineDiagnosis CopyEngine::diagnose() const {
  std::vector<uint32_t> seen(place_of(kWords, 0, 0, size_));
  const uint32_t beat = protocol::load_acquire(host_status_->beat);
  const uint32_t expected = protocol::load_acquire(host_status_->expected), asked = expected >> kMarkShift;
  const int late = unused_turn();
  for (size_t i = 0; i < seen.size(); ++i) seen[i] = protocol::load_acquire(words_.host[rank_][i]);
  if (protocol::load_acquire(host_status_->expected) != expected || protocol::load_relaxed(host_status_->beat) != beat)
    return {};
  const auto count_of = [&](Word which, int peer) {
    const auto first = seen.begin() + static_cast<ptrdiff_t>(place_of(which, peer, 0, size_));
    return std::count_if(first, first + kSlots, [](uint32_t value) { return value != 0; });
  };
  // A missing peer has sent nothing that waits to be used; most likely one that also has not consumed what it received.
  std::vector<int> silent, idle;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const uint32_t mark = seen[place_of(entered, peer, 0, size_)];
    if ((asked >> peer & 1) != 0 && mark != 0 && mark != (expected & kMarkBits)) return {peer, true};
    if (count_of(arrived, peer) + count_of(came, peer) != 0) continue;
    silent.push_back(peer);
    if (count_of(free_slot, peer) + count_of(taken, peer) != 2 * kSlots) idle.push_back(peer);
  }
  if (late >= 0 && late != rank_) return {late, false};
  if (idle.size() == 1) return {idle[0], false};
  return {silent.size() == 1 ? silent[0] : -1, false};
}

}  // namespace ark
