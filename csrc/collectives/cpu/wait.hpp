// Waits for a counter in shared memory: spins briefly, then sleeps on a futex.
//
// One peer in another process (or, for a doorbell, any peer) writes the counter through protocol::advance or ring.
// GroupHealth::alarm, checked at least every kSleepSlice, reports an abort record, a lost peer or the deadline, so
// every wait is bounded. A futex shared between processes needs no registration and leaves nothing behind. `sleepers`
// lets the writer skip the system call if no thread sleeps.
#pragma once

#include <chrono>
#include <cstdint>

#include "health/group_health.hpp"
#include "protocol/counter.hpp"

namespace ark {

// How long to spin before sleeping. With more ranks than cores, spinning only delays the awaited rank, so the waiter
// yields a few times and sleeps.
struct SpinPolicy {
  std::chrono::nanoseconds spin{50'000};
  int yields = 0;
  // `asked` negative: chosen from the numbers of ranks and of cores that they share.
  static SpinPolicy choose(int ranks, int cores, std::chrono::nanoseconds asked);
};

class Waiter {
 public:
  Waiter(GroupHealth& health, SpinPolicy policy) : health_(health), policy_(policy) {}

  void set_operation(const OperationContext& operation) { operation_ = operation; }
  const OperationContext& operation() const { return operation_; }
  GroupHealth& health() { return health_; }

  // Returns once counter >= target. Throws as GroupHealth::raise does. `peer`: the counter's owner; -1: any.
  void until(protocol::Counter& counter, uint64_t target, int peer) {
    if (!protocol::reached(counter, target)) wait_slowly(counter, target, peer);
  }

 private:
  void wait_slowly(protocol::Counter& counter, uint64_t target, int peer);

  GroupHealth& health_;
  SpinPolicy policy_;
  OperationContext operation_;
};

// Advances (or rings) and wakes sleepers, if any.
void advance_and_wake(protocol::Counter& counter, uint64_t value);
void ring_and_wake(protocol::Counter& counter);

// Sleeps until `counter` leaves `seen`, a wake-up, or `limit`. Spurious returns are allowed.
void sleep_on(protocol::Counter& counter, uint64_t seen, std::chrono::nanoseconds limit);

}  // namespace ark
