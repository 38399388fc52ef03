// Two-state flags between a kernel and operations that wait in a stream. Host and device code.
//
// A stream operation in a graph waits for and writes constants, so these words cannot count. They are the one exception
// to "counters only grow". One side raises a flag, and the other lowers it, which arms it for the next message or
// replay. A stream's wait has no bound. Its flags are in memory that the host can write, and an abort raises all of
// them repeatedly until the stream is empty.
//
// A message by a posted copy in slot s:
//   sender    waits for the credit of message - slots, then raises go[s]            (release)
//   stream    waits for go[s] == 1, writes 0 to it, copies, writes 1 to arrived[s]  (in this order)
//   receiver  waits for arrived[s] == 1 (acquire), consumes the message, lowers arrived[s], then returns the credit
//             (release)
// go[s] is raised again only after a credit, so after the stream's write of 0, which precedes the copy. arrived[s] is
// written again only after a go that needed the credit, so after the receiver lowered it.
#pragma once

#include "protocol/atomics.hpp"

namespace ark::protocol {

// A cache line each, because different sides write neighbouring flags.
struct alignas(64) Flag {
  uint32 raised;
};

ARK_HOST_DEVICE inline bool is_raised(const Flag& flag) {
  return load_acquire(flag.raised) != 0;
}
ARK_HOST_DEVICE inline void raise(Flag& flag) {
  store_release(flag.raised, uint32{1});
}
// A later release by the same thread publishes it.
ARK_HOST_DEVICE inline void lower(Flag& flag) {
  store_relaxed(flag.raised, uint32{0});
}

}  // namespace ark::protocol
