// Counters that only grow, and the slot arithmetic of a channel; host and device code. A Counter has one writer (or, as
// a doorbell, several that add) and any number of readers. It is never reset, so a replay, a loop or a late reader
// needs no host action. Each is in its own cache line.
#pragma once

#include "protocol/atomics.hpp"

namespace ark::protocol {

// Memory order. The writer fills a slot with ordinary stores, then advances `value`, a release: a reader that acquires
// the new value sees the slot's bytes. A reader that is done with a slot advances its own `released` counter, a
// release: a writer that acquires it may overwrite the slot. Sleeping (host only) is a Dekker handshake: the writer
// stores `value`, then loads `sleepers`; the sleeper adds to `sleepers`, then loads `value`. All four are sequentially
// consistent, so one of the two sees the other and no wake-up is lost.

inline constexpr unsigned kCacheLine = 64;

struct alignas(kCacheLine) Counter {
  uint64 value;
  uint32 sleepers;  // host threads asleep on the low half of `value`
  uint32 reserved;
};
static_assert(sizeof(Counter) == kCacheLine);

ARK_HOST_DEVICE inline uint64 current(const Counter& counter) {
  return load_acquire(counter.value);
}

ARK_HOST_DEVICE inline bool reached(const Counter& counter, uint64 target) {
  return current(counter) >= target;
}

// Advances to `value`. Returns true if a host sleeper must be woken, which collectives/cpu/wait.hpp does.
ARK_HOST_DEVICE inline bool advance(Counter& counter, uint64 value) {
  store_ordered(counter.value, value);
  return load_ordered(counter.sleepers) != 0;
}

// Adds one: for doorbells, which several writers ring.
ARK_HOST_DEVICE inline bool ring(Counter& counter) {
  add_ordered(counter.value, uint64{1});
  return load_ordered(counter.sleepers) != 0;
}

// A channel of `slots` slots carries messages 0, 1, 2, ...; message n is in slot n % slots. The writer may fill it once
// every reader has released message n - slots, that is, once their counters have reached this:
ARK_HOST_DEVICE inline uint64 needed_to_write(uint64 message, uint64 slots) {
  return message + 1 > slots ? message + 1 - slots : 0;
}

ARK_HOST_DEVICE inline uint64 slot_of(uint64 message, uint64 slots) {
  return message % slots;
}

}  // namespace ark::protocol
