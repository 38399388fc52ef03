// Tells every waiter whether the group can still finish what it started.
//
// A group fails once. The first rank that notices a problem (a lost peer, a deadline, a mismatch, abort()) writes its
// abort record into shared memory. Every waiter on every rank checks at least once per slice and raises an error that
// names the same culprit. Nothing is repaired: a failed group raises from then on. Thread-safe: fail() may race with
// itself and with checks; the first record wins.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "health/control_block.hpp"
#include "health/monitor.hpp"
#include "util/error.hpp"

namespace ark {

using Clock = std::chrono::steady_clock;

// The operation that a wait belongs to, for deadlines and messages.
struct OperationContext {
  const char* name = "";
  uint64_t sequence = 0;
  Clock::time_point deadline = Clock::time_point::max();
  std::chrono::milliseconds timeout{0};  // the timeout behind the deadline, for the message
};

class GroupHealth {
 public:
  // control[r] is rank r's block. `monitor` may be null (one rank). names[r]: rank r's name in messages if this is a
  // part of a group; empty: r.
  GroupHealth(int rank, std::vector<ControlBlock*> control, std::unique_ptr<PeerMonitor> monitor,
              std::vector<int> names = {});

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(control_.size()); }
  int name(int rank) const { return rank < 0 || names_.empty() ? rank : names_[rank]; }
  ControlBlock& own() { return *control_[rank_]; }
  ControlBlock& of(int rank) { return *control_[rank]; }
  const ControlBlock& of(int rank) const { return *control_[rank]; }

  // True once this rank has failed the group or seen a peer do so: the fast check at the start of an operation.
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  // Throws if this rank or any peer has failed the group: a late rank must not continue what a peer gave up.
  void check_alive(const OperationContext& operation);

  // Why a wait on `peer` should end, if it should; no side effects. `peer` -1: any peer will do. A waiter that gets an
  // alarm checks its counter again before it raises: it read the alarm first, and what a peer published before it left
  // counts.
  struct Alarm {
    enum Kind { failed, peer_failed, lost, departed, late } kind;
    int rank;  // the rank concerned
  };
  std::optional<Alarm> alarm(const OperationContext& operation, int peer) const;

  // Fails the group for this reason, unless it has failed already, and throws.
  [[noreturn]] void raise(const Alarm& alarm, const OperationContext& operation, int peer);

  // Throws the error that failed the group, reworded for this operation.
  [[noreturn]] void raise(const OperationContext& operation);

  // Fails the group with this error and tells the peers. The first call wins.
  void fail(const Error& error);

  // Extra time for a rank that waits outside (kWaitsOutside) to find the cause. It is blamed only after that. Set it
  // before any wait.
  void set_patience_outside(std::chrono::milliseconds patience) { patience_outside_ = patience; }

  // The rank that is really late when this rank waits on `peer`: follows the ranks' own waits to the end.
  int find_culprit(int peer) const;

  // One line per rank for the flight record.
  struct Progress {
    uint64_t enqueued, started, completed;
    int waiting_on;
    std::string operation;
    bool lost;
  };
  std::vector<Progress> progress() const;

  void say_goodbye();
  bool lost(int peer) const { return monitor_ && monitor_->lost(peer); }

 private:
  std::optional<Alarm> hear_from_outside(int culprit, const OperationContext& operation) const;
  Error explain(const Alarm& alarm, const OperationContext& operation, int peer) const;

  int rank_;
  std::vector<ControlBlock*> control_;
  std::unique_ptr<PeerMonitor> monitor_;
  const std::vector<int> names_;
  std::chrono::milliseconds patience_outside_{0};
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::optional<Error> failure_;
};

}  // namespace ark
