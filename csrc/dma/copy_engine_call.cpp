// See copy_engine_call.hpp.
#include "dma/copy_engine_call.hpp"

#include <utility>

namespace ark {

CopyEngine::Call::Call(CopyEngine& engine, CUstream stream, uint64_t copies)
    : engine_(engine),
      stream_(stream),
      awaiting_(copies >= engine.apart_from ? engine.awaiting_ : engine.link_),
      telling_(copies >= engine.apart_from ? engine.telling_ : engine.link_),
      awaits_(awaiting_),
      tells_(telling_) {
  CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
  check(driver().stream_is_capturing(stream, &capturing), "cuStreamIsCapturing");
  captured_ = capturing != CU_STREAM_CAPTURE_STATUS_NONE;
  check(driver().event_record(engine.event_, stream), "cuEventRecord");
  const auto join = [&](CUstream own) {
    check(driver().stream_wait_event(own, engine.event_, 0), "cuStreamWaitEvent");
  };
  join(engine.link_);
  if (awaiting_ != engine.link_) join(awaiting_), join(telling_);
  for (CUstream own : engine.work_) {
    work_.emplace_back(own);
    join(own);
  }
  // That a call begins, on the stream that has nothing to do for longest. In a graph a constant would say so only once,
  // so replays copy what the host's clock is then.
  work_.back().tell(engine.told(&device::EngineStatus::busy));
  if (!captured_) work_.back().tell(engine.told(&device::EngineStatus::beat), ++engine.calls_);
  work_.back().enqueue();
  if (!captured_) return;
  const CUstream idle = engine.work_[kWorkers - 1];
  char* const relay = engine.memory_[engine.rank_];
  engine.copy(idle, relay, &engine.status_->clock, sizeof engine.status_->clock);
  engine.copy(idle, &engine.status_->beat, relay, sizeof engine.status_->beat);
}

void CopyEngine::Call::finish() {
  step();
  const CUstream last = engine_.work_[kWorkers - 1];
  const auto join = [&](CUstream own) {
    engine_.follow(last, own);
    if (!captured_) check(driver().stream_wait_event(stream_, engine_.event_, 0), "cuStreamWaitEvent");
  };
  join(engine_.link_);
  if (awaiting_ != engine_.link_) join(awaiting_), join(telling_);
  for (int i = 0; i + 1 < kWorkers; ++i) join(engine_.work_[i]);
  // Nobody needs to wait for what is only told to the host, but a graph refuses a stream that does not end in it.
  if (!captured_) engine_.follow(stream_, last);
  work_.back().tell(engine_.told(&device::EngineStatus::busy), 0);
  work_.back().enqueue();
  if (captured_) engine_.follow(stream_, last);
}

void CopyEngine::Call::enter(MaybeOutputs outputs, uint32_t senders) {
  if (outputs == nullptr) return;
  for_each(senders, [&](int r) { tells_.tell(engine_.word(r, entered, engine_.rank_, 0), outputs->mark & kMarkBits); });
}

// That they are awaited is told to the host until they have been sent something, see send(): a peer that has got all of
// this call may tell the mark of its next one.
void CopyEngine::Call::await_entered(MaybeOutputs outputs, uint32_t receivers) {
  if (outputs == nullptr || receivers == 0) return;
  const uint32_t mark = outputs->mark & kMarkBits;
  awaits_.tell(engine_.told(&device::EngineStatus::expected), receivers << kMarkShift | mark);
  for_each(receivers, [&](int r) { awaits_.await(engine_.word(engine_.rank_, entered, r, 0), mark); });
  expecting_ = true;
}

// On the stream of the first sum, which nobody can fetch before.
void CopyEngine::Call::await_entered_to_add(MaybeOutputs outputs, uint32_t receivers) {
  if (outputs == nullptr || receivers == 0) return;
  const uint32_t mark = outputs->mark & kMarkBits;
  StreamWords& words = work_[worker(0)];
  words.tell(engine_.told(&device::EngineStatus::expected), receivers << kMarkShift | mark);
  for_each(receivers, [&](int r) { words.await(engine_.word(engine_.rank_, entered, r, 0), mark); });
  words.tell(engine_.told(&device::EngineStatus::expected), 0);
}

// What was told before is enqueued before what is awaited now (copy_engine.hpp: one queue).
void CopyEngine::Call::over_link(void* to, const void* from, uint64_t bytes) {
  tells_.enqueue();
  awaits_.enqueue();
  engine_.follow(engine_.link_, awaiting_);
  const uint64_t tail = passing_ >= 0 && bytes >= 2 * engine_.tail_bytes ? engine_.tail_bytes : 0;
  if (tail != 0) {
    engine_.copy(engine_.link_, to, from, bytes - tail);
    engine_.follow(telling_, engine_.link_);
    tell_turn(tells_);
    tells_.enqueue();
    to = static_cast<char*>(to) + bytes - tail, from = static_cast<const char*>(from) + bytes - tail;
  }
  engine_.copy(engine_.link_, to, from, tail != 0 ? tail : bytes);
  engine_.follow(telling_, engine_.link_);
  tell_turn(tells_);
}

// Of two ranks each has a link to itself.
void CopyEngine::Call::take_turn(int link) {
  tell_turn(awaits_);
  if (engine_.size_ > 2) awaits_.await(engine_.word(engine_.rank_, turn, link, 0));
}

void CopyEngine::Call::pass_turn(int link) {
  if (engine_.size_ > 2) passing_ = link;
}

// Behind a copy, or where there was none behind the wait for the turn.
void CopyEngine::Call::tell_turn(StreamWords& words) {
  if (passing_ < 0) return;
  const int link = std::exchange(passing_, -1), next = engine_.before(engine_.rank_);
  words.tell(engine_.word(next != link ? next : engine_.before(next), turn, link, 0));
}

void CopyEngine::Call::push_part(int owner, uint64_t piece, const void* from, uint64_t bytes) {
  awaits_.await(engine_.word(engine_.rank_, free_slot, owner, piece));
  over_link(engine_.slot(owner, parts, engine_.rank_, piece), from, bytes);
  tells_.tell(engine_.word(owner, arrived, engine_.rank_, piece));
}

void CopyEngine::Call::add_up(uint64_t piece, const void* own, void* sum, uint64_t bytes, const Add& add,
                              bool fetched) {
  tells_.enqueue();
  const int rank = engine_.rank_;
  StreamWords& words = work_[worker(piece)];
  const CUstream stream = engine_.work_[worker(piece)];
  const void* contributions[device::kMaxRanks] = {};
  for_each(engine_.others(), [&](int r) {
    words.await(engine_.word(rank, arrived, r, piece));
    contributions[r] = engine_.slot(rank, parts, r, piece);
    if (fetched) words.await(engine_.word(rank, taken, r, piece));
  });
  contributions[rank] = own;
  words.enqueue();
  add(contributions, sum, fetched ? engine_.slot(rank, sums, rank, piece) : nullptr, bytes, stream);
  if (fetched)
    for_each(engine_.others(), [&](int r) { words.tell(engine_.word(r, came, rank, piece)); });
  else
    check(driver().event_record(engine_.done_[piece % engine_.slots_], stream), "cuEventRecord");
  for_each(engine_.others(), [&](int r) { words.tell(engine_.word(r, free_slot, rank, piece)); });
  words.enqueue();
}

void CopyEngine::Call::fetch_sum(int owner, uint64_t piece, void* to, uint64_t bytes) {
  awaits_.await(engine_.word(engine_.rank_, came, owner, piece));
  over_link(to, engine_.slot(owner, sums, owner, piece), bytes);
  tells_.tell(engine_.word(owner, taken, engine_.rank_, piece));
}

void CopyEngine::Call::await_sum(uint64_t piece) {
  check(driver().stream_wait_event(engine_.link_, engine_.done_[piece % engine_.slots_], 0), "cuStreamWaitEvent");
}

void CopyEngine::Call::send(int receiver, uint64_t piece, void* place, const void* from, uint64_t bytes) {
  awaits_.await(engine_.word(engine_.rank_, taken, receiver, piece));
  over_link(place != nullptr ? place : engine_.slot(receiver, messages, engine_.rank_, piece), from, bytes);
  if (std::exchange(expecting_, false)) tells_.tell(engine_.told(&device::EngineStatus::expected), 0);
  tells_.tell(engine_.word(receiver, came, engine_.rank_, piece));
}

void CopyEngine::Call::receive(int sender, uint64_t piece, void* to, uint64_t bytes, bool straight) {
  tells_.enqueue();
  StreamWords& words = work_[worker(piece)];
  words.await(engine_.word(engine_.rank_, came, sender, piece));
  if (!straight) {
    words.enqueue();
    engine_.copy(engine_.work_[worker(piece)], to, engine_.slot(engine_.rank_, messages, sender, piece), bytes);
  }
  words.tell(engine_.word(sender, taken, engine_.rank_, piece));
}

void CopyEngine::Call::forward(int sender, uint64_t piece, void* to, uint64_t bytes, bool straight, int next,
                               void* place) {
  const CUdeviceptr it_came = engine_.word(engine_.rank_, came, sender, piece);
  const CUdeviceptr it_was_taken = engine_.word(sender, taken, engine_.rank_, piece);
  awaits_.await(it_came);
  if (straight) {
    awaits_.tell(it_was_taken);
    return send(next, piece, place, to, bytes);
  }
  tells_.enqueue();
  awaits_.enqueue();
  const CUstream stream = engine_.work_[worker(piece)];
  const char* const here = engine_.slot(engine_.rank_, messages, sender, piece);
  engine_.follow(stream, awaiting_);
  engine_.copy(stream, to, here, bytes);
  send(next, piece, place, here, bytes);
  engine_.follow(stream, engine_.link_);
  work_[worker(piece)].tell(it_was_taken);
}

void CopyEngine::Call::copy_own(void* to, const void* from, uint64_t bytes) {
  if (bytes != 0 && to != from) engine_.copy(engine_.work_[0], to, from, bytes);
}

void CopyEngine::Call::step() {
  tell_turn(awaits_);
  tells_.enqueue();
  awaits_.enqueue();
  for (StreamWords& words : work_) words.enqueue();
}

}  // namespace ark
