// Waiting for a counter in shared memory: spin briefly, then sleep on a futex.
//
// Who writes: one peer (or, for a doorbell, any peer), in another process, through protocol::advance or ring.
// Who gives up, and when: GroupHealth::alarm, asked at least every kSleepSlice, reports an abort record, a lost
// peer or the deadline, so every wait is bounded. A futex shared between processes needs no registration and leaves
// nothing behind; `sleepers` keeps the writer out of the kernel when nobody sleeps.
#pragma once

#include <chrono>
#include <cstdint>

#include "health/group_health.hpp"
#include "protocol/counter.hpp"

namespace ark {

// How long to burn the processor before sleeping. With more ranks than cores spinning only keeps the awaited rank
// from running, so there the waiter yields a few times and sleeps.
struct SpinPolicy {
  std::chrono::nanoseconds spin{50'000};
  int yields = 0;
  // `asked` negative: chosen by the ranks and the cores that they have together.
  static SpinPolicy choose(int ranks, int cores, std::chrono::nanoseconds asked);
};

class Waiter {
 public:
  Waiter(GroupHealth& health, SpinPolicy policy) : health_(health), policy_(policy) {}

  void set_operation(const OperationContext& operation) { operation_ = operation; }
  const OperationContext& operation() const { return operation_; }
  GroupHealth& health() { return health_; }

  // Returns once counter >= target; throws what GroupHealth::raise throws. `peer`: whose counter it is, -1 anyone's.
  void until(protocol::Counter& counter, uint64_t target, int peer) {
    if (!protocol::reached(counter, target)) wait_slowly(counter, target, peer);
  }

 private:
  void wait_slowly(protocol::Counter& counter, uint64_t target, int peer);

  GroupHealth& health_;
  SpinPolicy policy_;
  OperationContext operation_;
};

// Advances (or rings) and wakes the sleepers, if any.
void advance_and_wake(protocol::Counter& counter, uint64_t value);
void ring_and_wake(protocol::Counter& counter);

// Sleeps until `counter` leaves `seen`, is woken, or `limit` has passed. Spurious returns are allowed.
void sleep_on(protocol::Counter& counter, uint64_t seen, std::chrono::nanoseconds limit);

}  // namespace ark
