// A ring of 16-byte requests from GPU threads to a host thread, committed by parity; host and device code.
//
// A request is two words. The top bit of each is the parity of its lap around the ring, so the reader distinguishes a
// new half from one of the previous lap, in whichever order halves become visible, without a separate counter. A ring
// starts as zeros, which is not the first lap's parity. Many threads may post: each takes a number from `head`, which
// determines its place; requests are served in the order of numbers.
#pragma once

#include "protocol/atomics.hpp"

namespace ark::protocol {

// Memory order. A post releases all that its thread did or saw before: on the device by a fence and one 16-byte store,
// on the host by two stores with release. The reader acquires both halves. It stores `served` with release after
// reading a request; a poster that needs the place acquires it.
//
// No deadlock. A poster waits only while `kRequests` are in flight, and the reader only for the next poster, which has
// its place already.

inline constexpr uint64 kRequests = 128;

// Offsets are within the memory windows registered with the reader. A probe asks whether the channel's peer is there.
struct Request {
  enum Kind : uint32 { put = 1, put_with_signal = 2, signal = 3, probe = 4 };
  Kind kind;
  uint32 channel;          // whose arrivals the signal counts; below 256
  uint64 to, from, bytes;  // offsets below 2^40, bytes below 2^35
};

struct alignas(16) RequestWords {
  uint64 low, high;
};

// Initially zero. In host memory that the device writes; `head` is in the device's own memory.
struct RequestRing {
  RequestWords requests[kRequests];
  alignas(64) uint64 served;
};

inline constexpr uint64 kMostRequestOffset = (uint64{1} << 40) - 1, kMostRequestBytes = (uint64{1} << 35) - 1;

// parity 1, kind 3, 20 low bits of bytes, from 40; parity 1, channel 8, 15 high bits of bytes, to 40.
ARK_HOST_DEVICE inline RequestWords packed(const Request& request, uint64 number) {
  const uint64 parity = (number / kRequests % 2 == 0 ? uint64{1} : uint64{0}) << 63;
  return {parity | uint64{request.kind} << 60 | (request.bytes & 0xfffff) << 40 | request.from,
          parity | uint64{request.channel} << 55 | request.bytes >> 20 << 40 | request.to};
}
ARK_HOST_DEVICE inline Request unpacked(const RequestWords& words) {
  const uint64 offsets = kMostRequestOffset;
  return {static_cast<Request::Kind>(words.low >> 60 & 7), static_cast<uint32>(words.high >> 55 & 255),
          words.high & offsets, words.low & offsets, (words.low >> 40 & 0xfffff) | (words.high >> 40 & 0x7fff) << 20};
}

// Poster: takes a number, for which it must then post.
ARK_HOST_DEVICE inline uint64 take_number(uint64& head) {
  return add_relaxed(head, uint64{1});
}
// Whether the number's place is free. `known`: the last value of `served` that the caller has seen.
ARK_HOST_DEVICE inline bool has_room(const RequestRing& ring, uint64 number, uint64& known) {
  if (number < known + kRequests) return true;
  known = load_acquire(ring.served);
  return number < known + kRequests;
}
ARK_HOST_DEVICE inline void post(RequestRing& ring, uint64 number, const Request& request) {
  const RequestWords words = packed(request, number);
  RequestWords& place = ring.requests[number % kRequests];
#if ARK_DEVICE_CODE
  asm volatile("fence.acq_rel.sys; st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(&place), "l"(words.low),
               "l"(words.high)
               : "memory");
#else
  store_release(place.low, words.low);
  store_release(place.high, words.high);
#endif
}

// Reader: takes the request of this number, if it has arrived.
ARK_HOST_DEVICE inline bool take(const RequestRing& ring, uint64 number, Request& request) {
  const RequestWords& place = ring.requests[number % kRequests];
  const uint64 parity = number / kRequests % 2 == 0 ? 1 : 0;
  RequestWords words;
  words.low = load_acquire(place.low);
  if (words.low >> 63 != parity) return false;
  words.high = load_acquire(place.high);
  if (words.high >> 63 != parity) return false;
  request = unpacked(words);
  return true;
}
ARK_HOST_DEVICE inline void served(RequestRing& ring, uint64 number) {
  store_release(ring.served, number + 1);
}

}  // namespace ark::protocol
