// Enqueues the steps of one copy engine call.
#include "collectives/cuda/copy_engine/copy_engine_call.hpp"

#include <utility>

namespace ark {

namespace {

bool is_captured(CUstream stream) {
  CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
  check(driver().stream_is_capturing(stream, &capturing), "cuStreamIsCapturing");
  return capturing != CU_STREAM_CAPTURE_STATUS_NONE;
}

}  // namespace

// A graph launch is one driver call anyway, so it is never in line. Neither is the default stream: other streams wait
// for each of its operations.
CopyEngine::Call::Call(CopyEngine& engine, CUstream stream, uint64_t copies, bool in_line)
    : engine_(engine),
      stream_(stream),
      captured_(is_captured(stream)),
      in_line_(in_line && !captured_ && stream != nullptr),
      link_(in_line_ ? stream : engine.link_),
      awaiting_(!in_line_ && copies >= engine.apart_from ? engine.awaiting_ : link_),
      telling_(!in_line_ && copies >= engine.apart_from ? engine.telling_ : link_),
      words_([&] {
        std::vector<StreamWords> words{StreamWords(awaiting_)};
        if (in_line_) return words;
        words.emplace_back(telling_);
        for (CUstream own : engine.work_) words.emplace_back(own);
        return words;
      }()),
      awaits_(words_.front()),
      tells_(in_line_ ? awaits_ : words_[1]) {
  const CUstream last = engine.work_[kWorkers - 1];
  if (in_line_) {
    if (std::exchange(engine.told_idle_, false))
      check(driver().stream_wait_event(stream, engine.idle_, 0), "cuStreamWaitEvent");
  } else {
    check(driver().event_record(engine.event_, stream), "cuEventRecord");
    const auto join = [&](CUstream own) {
      check(driver().stream_wait_event(own, engine.event_, 0), "cuStreamWaitEvent");
    };
    join(link_);
    if (awaiting_ != link_) join(awaiting_), join(telling_);
    for (CUstream own : engine.work_) join(own);
  }
  // Reports that a call begins, on the stream that stays idle longest. In a graph a constant beat would only count
  // once, so replays copy the current value of the host's clock.
  StreamWords& words = words_of(kWorkers - 1);
  words.tell(engine.told(&device::EngineStatus::busy));
  if (!captured_) words.tell(engine.told(&device::EngineStatus::beat), ++engine.calls_);
  if (in_line_) return;
  words.enqueue();
  if (!captured_) return;
  char* const relay = engine.memory_[engine.rank_];
  engine.copy(last, relay, &engine.status_->clock, sizeof engine.status_->clock);
  engine.copy(last, &engine.status_->beat, relay, sizeof engine.status_->beat);
}

void CopyEngine::Call::finish() {
  step();
  StreamWords& words = words_of(kWorkers - 1);
  words.tell(engine_.told(&device::EngineStatus::busy), 0);
  if (in_line_) return words.enqueue();
  const CUstream last = worker(kWorkers - 1);
  const auto join = [&](CUstream own) {
    engine_.follow(last, own);
    if (!captured_) check(driver().stream_wait_event(stream_, engine_.event_, 0), "cuStreamWaitEvent");
  };
  join(link_);
  if (awaiting_ != link_) join(awaiting_), join(telling_);
  for (int i = 0; i + 1 < kWorkers; ++i) join(worker(i));
  // Only a call in line must wait for the final words to the host, and a graph, which requires all streams to join.
  if (!captured_) engine_.follow(stream_, last);
  words.enqueue();
  if (captured_) return engine_.follow(stream_, last);
  check(driver().event_record(engine_.idle_, last), "cuEventRecord");
  engine_.told_idle_ = true;
}

void CopyEngine::Call::enter(MaybeOutputs outputs, uint32_t senders) {
  if (outputs == nullptr) return;
  for_each(senders, [&](int r) { tells_.tell(engine_.word(r, entered, engine_.rank_, 0), outputs->mark & kMarkBits); });
}

// The host sees the awaited receivers until something was sent to them (send()). After that, a peer that has all of
// this call may already send the next call's mark.
void CopyEngine::Call::await_entered(MaybeOutputs outputs, uint32_t receivers) {
  if (outputs == nullptr || receivers == 0) return;
  const uint32_t mark = outputs->mark & kMarkBits;
  awaits_.tell(engine_.told(&device::EngineStatus::expected), receivers << kMarkShift | mark);
  for_each(receivers, [&](int r) { awaits_.await(engine_.word(engine_.rank_, entered, r, 0), mark); });
  expecting_ = true;
}

// On the stream of the first sum: no peer can fetch it before.
void CopyEngine::Call::await_entered_to_add(MaybeOutputs outputs, uint32_t receivers) {
  if (outputs == nullptr || receivers == 0) return;
  const uint32_t mark = outputs->mark & kMarkBits;
  StreamWords& words = words_of(0);
  words.tell(engine_.told(&device::EngineStatus::expected), receivers << kMarkShift | mark);
  for_each(receivers, [&](int r) { words.await(engine_.word(engine_.rank_, entered, r, 0), mark); });
  words.tell(engine_.told(&device::EngineStatus::expected), 0);
}

// Enqueues earlier signals before the current waits, because all streams may share one queue (copy_engine.hpp).
void CopyEngine::Call::over_link(void* to, const void* from, uint64_t bytes) {
  tells_.enqueue();
  awaits_.enqueue();
  engine_.follow(link_, awaiting_);
  const uint64_t tail = passing_ >= 0 && bytes >= 2 * engine_.tail_bytes ? engine_.tail_bytes : 0;
  if (tail != 0) {
    engine_.copy(link_, to, from, bytes - tail);
    engine_.follow(telling_, link_);
    tell_turn(tells_);
    tells_.enqueue();
    to = static_cast<char*>(to) + bytes - tail, from = static_cast<const char*>(from) + bytes - tail;
  }
  engine_.copy(link_, to, from, tail != 0 ? tail : bytes);
  engine_.follow(telling_, link_);
  tell_turn(tells_);
}

// With two ranks each has a link to itself.
void CopyEngine::Call::take_turn(int link) {
  tell_turn(awaits_);
  if (engine_.size_ > 2) awaits_.await(engine_.word(engine_.rank_, turn, link, 0));
}

void CopyEngine::Call::pass_turn(int link) {
  if (engine_.size_ > 2) passing_ = link;
}

// Passes the turn after the copy or, without one, after the wait for the turn.
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
  const int rank = engine_.rank_;
  StreamWords& words = words_of(piece);
  const CUstream stream = worker(piece);
  order(tells_, words);
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
  else if (!in_line_)
    check(driver().event_record(engine_.done_[piece % engine_.slots_], stream), "cuEventRecord");
  for_each(engine_.others(), [&](int r) { words.tell(engine_.word(r, free_slot, rank, piece)); });
  if (!in_line_) words.enqueue();
}

void CopyEngine::Call::fetch_sum(int owner, uint64_t piece, void* to, uint64_t bytes) {
  awaits_.await(engine_.word(engine_.rank_, came, owner, piece));
  over_link(to, engine_.slot(owner, sums, owner, piece), bytes);
  tells_.tell(engine_.word(owner, taken, engine_.rank_, piece));
}

void CopyEngine::Call::await_sum(uint64_t piece) {
  if (in_line_) return;
  check(driver().stream_wait_event(link_, engine_.done_[piece % engine_.slots_], 0), "cuStreamWaitEvent");
}

void CopyEngine::Call::send(int receiver, uint64_t piece, void* place, const void* from, uint64_t bytes) {
  awaits_.await(engine_.word(engine_.rank_, taken, receiver, piece));
  over_link(place != nullptr ? place : engine_.slot(receiver, messages, engine_.rank_, piece), from, bytes);
  if (std::exchange(expecting_, false)) tells_.tell(engine_.told(&device::EngineStatus::expected), 0);
  tells_.tell(engine_.word(receiver, came, engine_.rank_, piece));
}

void CopyEngine::Call::receive(int sender, uint64_t piece, void* to, uint64_t bytes, bool straight) {
  StreamWords& words = words_of(piece);
  order(tells_, words);
  words.await(engine_.word(engine_.rank_, came, sender, piece));
  if (!straight) {
    words.enqueue();
    engine_.copy(worker(piece), to, engine_.slot(engine_.rank_, messages, sender, piece), bytes);
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
  const CUstream stream = worker(piece);
  const char* const here = engine_.slot(engine_.rank_, messages, sender, piece);
  engine_.follow(stream, awaiting_);
  engine_.copy(stream, to, here, bytes);
  send(next, piece, place, here, bytes);
  engine_.follow(stream, link_);
  words_of(piece).tell(it_was_taken);
}

void CopyEngine::Call::copy_own(void* to, const void* from, uint64_t bytes) {
  if (bytes != 0 && to != from) engine_.copy(worker(0), to, from, bytes);
}

void CopyEngine::Call::step() {
  tell_turn(awaits_);
  if (in_line_) return;  // pending words are enqueued before the next operation
  tells_.enqueue();
  awaits_.enqueue();
  for (StreamWords& words : words_) words.enqueue();
}

}  // namespace ark
