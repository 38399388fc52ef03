// Flags of two states between a kernel and operations that wait in a stream; host and device code.
//
// What a stream waits for and writes is a constant once it stands in a graph, so these words cannot count: they are the
// one exception to "counters only grow". A flag is raised by one side and lowered by the other, which thereby arms it
// for the next time, be that the next message or the next replay. A stream's wait has no bound: flags that a stream
// waits for lie where the host can write them, and an abort raises every one, again and again until the stream is
// empty.
//
// A message by a copy that was posted ahead, in slot s:
//   sender    waits for the credit of message - slots, then raises go[s]          (release)
//   stream    waits for go[s] == 1, writes 0 to it, copies, writes 1 to arrived[s] (in this order)
//   receiver  waits for arrived[s] == 1 (acquire), takes the message, lowers arrived[s], then gives the credit
//   (release)
// go[s] is raised again behind a credit, so behind the stream's write of 0, which came before the copy. arrived[s] is
// written again behind a go that the credit made possible, so behind the receiver's lowering it.
#pragma once

#include "protocol/atomics.hpp"

namespace ark::protocol {

// A line each: two sides write neighbours.
struct alignas(64) Flag {
  uint32 raised;
};

ARK_HOST_DEVICE inline bool is_raised(const Flag& flag) {
  return load_acquire(flag.raised) != 0;
}
ARK_HOST_DEVICE inline void raise(Flag& flag) {
  store_release(flag.raised, uint32{1});
}
// A later release of the same thread makes it seen.
ARK_HOST_DEVICE inline void lower(Flag& flag) {
  store_relaxed(flag.raised, uint32{0});
}

}  // namespace ark::protocol
