// Is this group still able to finish what it started? Asked by everyone who waits.
//
// A group fails once: the first rank that notices (a lost peer, a deadline, a mismatch, abort()) writes its abort
// record into shared memory, and every waiter on every rank, which looks at least once a slice, raises an error
// that names the same culprit. Nothing is repaired: a failed group raises from then on and is destroyed.
//
// Thread-safe: fail() may race with itself and with check(); the first record wins.
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

// The operation a wait belongs to: for deadlines and messages.
struct OperationContext {
  const char* name = "";
  uint64_t sequence = 0;
  Clock::time_point deadline = Clock::time_point::max();
  std::chrono::milliseconds timeout{0};  // what the deadline was made of, for the message
};

class GroupHealth {
 public:
  // control[r] is rank r's block. `monitor` may be null (one rank). names[r]: what messages call rank r, where this is
  // a part of a group; empty: r.
  GroupHealth(int rank, std::vector<ControlBlock*> control, std::unique_ptr<PeerMonitor> monitor,
              std::vector<int> names = {});

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(control_.size()); }
  int name(int rank) const { return rank < 0 || names_.empty() ? rank : names_[rank]; }
  ControlBlock& own() { return *control_[rank_]; }
  ControlBlock& of(int rank) { return *control_[rank]; }
  const ControlBlock& of(int rank) const { return *control_[rank]; }

  // True once this rank has failed the group or seen a peer do so: the fast test at the start of an operation.
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  // Raises when this rank or any peer has failed the group: a late rank must not go on with what a peer gave up.
  void check_alive(const OperationContext& operation);

  // Why a wait on `peer` should end, if it should. `peer` -1: any peer will do (none is to blame). No side effects.
  // A waiter that gets an alarm looks at its counter once more before it raises: what a peer published before it
  // went away counts, and the alarm was read first.
  struct Alarm {
    enum Kind { failed, peer_failed, lost, departed, late } kind;
    int rank;  // whom it is about
  };
  std::optional<Alarm> alarm(const OperationContext& operation, int peer) const;

  // Fails the group for this reason (when it has not failed yet) and throws.
  [[noreturn]] void raise(const Alarm& alarm, const OperationContext& operation, int peer);

  // Throws the error that failed the group, told for this operation.
  [[noreturn]] void raise(const OperationContext& operation);

  // Fails the group with this error and tells the peers. The first call wins.
  void fail(const Error& error);

  // How much longer than its own time a rank takes that waits for one outside (kWaitsOutside) to find out why. It is
  // blamed only after that. To be set before anyone waits.
  void set_patience_outside(std::chrono::milliseconds patience) { patience_outside_ = patience; }

  // Who is really late when this rank waits on `peer`: follows the ranks' own waits to their end.
  int find_culprit(int peer) const;

  // For the flight record: one line per rank.
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
