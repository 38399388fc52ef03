// Decides that a wait is hopeless, and gives every rank the same explanation.
#include "health/group_health.hpp"

#include <algorithm>
#include <cstring>
#include <thread>

namespace ark {

namespace {

constexpr const char* kRestart = "Destroy the process group on every rank (or restart the job) before going on.";

// About ten slices of a sleeping waiter (collectives/cpu/wait.cpp): long enough for a live one on a busy machine.
constexpr auto kBeats = std::chrono::milliseconds(200);
constexpr auto kSlice = std::chrono::milliseconds(20);

void copy_text(char* target, size_t room, const std::string& text) {
  const size_t bytes = std::min(room - 1, text.size());
  std::memcpy(target, text.data(), bytes);
  target[bytes] = 0;
}

std::string bounded_text(const char* text, size_t room) {
  return std::string(text, strnlen(text, room));
}

Error tell(ErrorKind kind, const std::string& what, int rank, int peer, const OperationContext& operation,
           const std::string& remedy) {
  return Error(kind, what, ErrorContext{rank, peer, operation.name, operation.sequence, remedy});
}

}  // namespace

GroupHealth::GroupHealth(int rank, std::vector<ControlBlock*> control, std::unique_ptr<PeerMonitor> monitor,
                         std::vector<int> names)
    : rank_(rank), control_(std::move(control)), monitor_(std::move(monitor)), names_(std::move(names)) {}

std::optional<GroupHealth::Alarm> GroupHealth::alarm(const OperationContext& operation, int peer) const {
  if (failed()) return Alarm{Alarm::failed, rank_};
  for (int other = 0; other < size(); ++other) {
    if (other == rank_) continue;
    if (protocol::load_acquire(control_[other]->abort_state) == kAbortSet) return Alarm{Alarm::peer_failed, other};
    if (!monitor_) continue;
    const bool departed = monitor_->departed(other);
    if (departed && other == peer) return Alarm{Alarm::departed, other};
    if (!departed && monitor_->lost(other)) return Alarm{Alarm::lost, other};
  }
  if (Clock::now() >= operation.deadline) return Alarm{Alarm::late, peer};
  return std::nullopt;
}

void GroupHealth::check_alive(const OperationContext& operation) {
  if (failed()) raise(operation);
  for (int other = 0; other < size(); ++other) {
    if (other == rank_ || protocol::load_acquire(control_[other]->abort_state) != kAbortSet) continue;
    raise(Alarm{Alarm::peer_failed, other}, operation, other);
  }
}

void GroupHealth::raise(const Alarm& alarm, const OperationContext& operation, int peer) {
  if (alarm.kind != Alarm::failed) fail(explain(alarm, operation, peer));
  raise(operation);
}

Error GroupHealth::explain(const Alarm& alarm, const OperationContext& operation, int peer) const {
  const std::string who = "rank " + std::to_string(name(alarm.rank));
  switch (alarm.kind) {
    case Alarm::failed: break;
    case Alarm::peer_failed: {
      // A peer's bytes are copied before they are used, and text is bounded.
      const AbortRecord record = control_[alarm.rank]->abort;
      const bool known = !names_.empty() || record.culprit < size();
      const int culprit = known ? std::max(record.culprit, -1) : -1;  // already a name
      const auto kind = record.kind <= static_cast<uint32_t>(ErrorKind::system) ? static_cast<ErrorKind>(record.kind)
                                                                                : ErrorKind::aborted;
      return tell(kind,
                  who + " reported in " + bounded_text(record.operation, sizeof record.operation) + " #" +
                      std::to_string(record.sequence) + ": " + bounded_text(record.text, sizeof record.text),
                  name(rank_), culprit, operation, kRestart);
    }
    case Alarm::lost:
      return tell(ErrorKind::peer_lost, who + " is gone: its process was killed or crashed", name(rank_),
                  name(alarm.rank), operation, std::string("Look at that rank's output for the cause. ") + kRestart);
    case Alarm::departed:
      return tell(ErrorKind::peer_lost,
                  who + " left the group (its process ended or destroyed the group) and will not take part",
                  name(rank_), name(alarm.rank), operation,
                  std::string("Issue the same collectives on every rank, and look at that rank's output. ") + kRestart);
    case Alarm::late: {
      std::string what = "timed out after " + std::to_string(operation.timeout.count()) + " ms";
      const int culprit = peer < 0 ? -1 : find_culprit(peer);
      if (const auto heard = hear_from_outside(culprit, operation)) return explain(*heard, operation, peer);
      if (culprit >= 0) {
        const ControlBlock& block = of(culprit);
        what += " waiting for rank " + std::to_string(name(culprit)) + ", which has issued " +
                std::to_string(protocol::load_relaxed(block.enqueued)) + " and completed " +
                std::to_string(protocol::load_relaxed(block.completed)) + " collectives of this group (this rank: " +
                std::to_string(protocol::load_relaxed(control_[rank_]->enqueued)) + " issued)";
      }
      return tell(ErrorKind::timeout, what, name(rank_), name(culprit), operation,
                  std::string("See whether that rank is stopped, slow, or called something else; set a longer timeout "
                              "if it is only slow. ") +
                      kRestart);
    }
  }
  return tell(ErrorKind::aborted, "the group failed", name(rank_), -1, operation, kRestart);
}

void GroupHealth::raise(const OperationContext& operation) {
  std::lock_guard lock(mutex_);
  if (!failure_) throw tell(ErrorKind::aborted, "the group failed", name(rank_), -1, operation, kRestart);
  const ErrorContext& context = failure_->context();
  if (context.operation == operation.name && context.sequence == operation.sequence) throw *failure_;
  throw tell(failure_->kind(), std::string("the group failed earlier: ") + failure_->what(), name(rank_), context.peer,
             operation, {});
}

void GroupHealth::fail(const Error& error) {
  {
    std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = error;
  }
  ControlBlock& block = own();
  uint32_t expected = kAbortNone;
  if (protocol::compare_exchange(block.abort_state, expected, kAbortWriting)) {
    block.abort.kind = static_cast<uint32_t>(error.kind());
    block.abort.culprit = error.context().peer;
    block.abort.sequence = error.context().sequence;
    copy_text(block.abort.operation, sizeof block.abort.operation, error.context().operation);
    copy_text(block.abort.text, sizeof block.abort.text, error.what());
    protocol::store_release(block.abort_state, kAbortSet);
  }
  failed_.store(true, std::memory_order_release);
}

// Waits for what comes to light while a rank that waits for another node finds the cause; nothing if it does not.
std::optional<GroupHealth::Alarm> GroupHealth::hear_from_outside(int culprit, const OperationContext& operation) const {
  if (culprit < 0 || protocol::load_relaxed(control_[culprit]->waiting_on) != kWaitsOutside) return std::nullopt;
  OperationContext unhurried = operation;
  unhurried.deadline = Clock::now() + patience_outside_;
  while (true) {
    const auto found = alarm(unhurried, -1);
    if (found && found->kind == Alarm::late) return std::nullopt;
    if (found) return found;
    std::this_thread::sleep_for(kSlice);
  }
}

// A rank that was stopped while sleeping still shows whom it waited for, so that counts only while its beat advances.
int GroupHealth::find_culprit(int peer) const {
  std::vector<uint64_t> beats;
  for (const ControlBlock* block : control_) beats.push_back(protocol::load_relaxed(block->beat));
  std::this_thread::sleep_for(kBeats);
  for (int hops = 0; hops < size(); ++hops) {
    const int64_t next = protocol::load_relaxed(control_[peer]->waiting_on) - 1;
    if (next < 0 || next >= size() || next == rank_) break;
    if (protocol::load_relaxed(control_[peer]->beat) == beats[peer]) break;
    peer = static_cast<int>(next);
  }
  return peer;
}

std::vector<GroupHealth::Progress> GroupHealth::progress() const {
  std::vector<Progress> all;
  for (int other = 0; other < size(); ++other) {
    const ControlBlock& block = *control_[other];
    const int64_t waiting_on = protocol::load_relaxed(block.waiting_on);
    all.push_back({protocol::load_relaxed(block.enqueued), protocol::load_relaxed(block.started),
                   protocol::load_relaxed(block.completed),
                   waiting_on == kWaitsOutside ? -1 : static_cast<int>(waiting_on) - 1,
                   bounded_text(block.operation, sizeof block.operation), lost(other)});
  }
  return all;
}

void GroupHealth::say_goodbye() {
  if (monitor_) monitor_->say_goodbye();
}

}  // namespace ark
