// One-way channels between GPUs, as a running kernel sees them. What all engines share; an engine a file:
//   channel_store.cuh        stores of all threads, a release, a word
//   channel_packet.cuh       16-byte packets, data and epoch together: soonest there
//   channel_bulk.cuh         TMA, driven by one thread: most bytes for the fewest SMs; also adds, also pulls
//   channel_copy_engine.cuh  copies that the host posted ahead, released by a flag: no SM moves a byte
//   channel_proxy.cuh        requests to a host thread, which starts a copy engine
//
// One API. A sender: open() (the next message may be written), put(to, from, bytes), signal() (all that was put is a
// message), put_with_signal(), flush() (until everything was taken), close() (keeps the count for the next launch). A
// receiver: wait() (the next message is there), release() (it was taken), close(). `to` is any memory of the peer that
// is mapped here; slot() is the message's own place in the channel's ring. bool: false when it is time to leave.
//
// Ordering: slots.hpp. The team's stores, its barrier, then its leader's store of `arrived` with release at
// system scope, which is cumulative over what the barrier ordered before it; the receiver's leader loads `arrived` with
// acquire and passes the knowledge on by its barrier. Credits go back behind the receiver's barrier.
//
// Liveness: every wait has a bound and looks for abort (Patience). Nothing waits but for the peer of this channel, so
// kernels with channels to each other are launched so that both are resident.
#pragma once

#include "cuda/packet.cuh"
#include "slots.hpp"

namespace ark::device {

inline constexpr uint32 kLaneWords = 16;  // 128 bytes from a lane's word to the next lane's

// One end of a channel, in both directions; memory of the peer as mapped here.
struct ChannelEnd {
  char* to_slots;  // [slots] of slot_bytes, in the peer's memory
  uint64* to_arrived;
  const uint64* credit;  // own
  const char* slots;     // own
  const uint64* arrived;
  uint64* to_credit;
  protocol::ChannelState* state;  // own
  GroupStatus* status;
  uint64 limit_ns;    // of one wait
  uint64 slot_bytes;  // a multiple of 128
  uint32 depth;       // slots
  int peer;
};

// Lanes side by side, each a channel of its own: slots of lane n behind those of lane n - 1, words kLaneWords apart.
ARK_HOST_DEVICE inline ChannelEnd lane_of(ChannelEnd end, uint32 lane) {
  const uint64 bytes = lane * end.depth * end.slot_bytes, words = lane * kLaneWords;
  end.to_slots += bytes, end.slots += bytes;
  end.to_arrived += words, end.credit += words, end.arrived += words, end.to_credit += words;
  end.state += lane;
  return end;
}

#if defined(__CUDACC__)

// Who drives an end of a channel together.
struct OneThread {
  static __device__ __forceinline__ uint32 rank() { return 0; }
  static __device__ __forceinline__ uint32 size() { return 1; }
  static __device__ __forceinline__ void sync() {}
  static __device__ __forceinline__ bool all(bool value) { return value; }
};
struct OneWarp {
  static __device__ __forceinline__ uint32 rank() { return threadIdx.x & 31; }
  static __device__ __forceinline__ uint32 size() { return 32; }
  static __device__ __forceinline__ void sync() { __syncwarp(); }
  static __device__ __forceinline__ bool all(bool value) { return __all_sync(~0u, value); }
};
struct OneBlock {
  static __device__ __forceinline__ uint32 rank() { return threadIdx.x; }
  static __device__ __forceinline__ uint32 size() { return blockDim.x; }
  static __device__ __forceinline__ void sync() { __syncthreads(); }
  static __device__ __forceinline__ bool all(bool value) { return __syncthreads_and(value) != 0; }
};

// One thread's: until the condition is met, or it is time to leave.
template <class Condition>
__device__ __forceinline__ bool await(const ChannelEnd& end, uint64 number, Condition met) {
  Patience patience{end.status, end.limit_ns};
  while (!met()) {
    if (patience.over(end.peer, number)) return false;
  }
  return true;
}

// A sender but for how bytes are put and messages told.
template <class Team>
class Sender {
 public:
  __device__ __forceinline__ explicit Sender(const ChannelEnd& end)
      : end_(end), writer_(end.to_arrived, end.credit, end.depth, end.state->sent) {}

  __device__ __forceinline__ uint64 sent() const { return writer_.sent(); }
  __device__ __forceinline__ char* slot() const { return end_.to_slots + writer_.slot() * end_.slot_bytes; }
  // The whole team's, like all below.
  __device__ __forceinline__ bool open() {
    const uint64 due = writer_.due();
    return due == 0 || taken(due);
  }
  __device__ __forceinline__ bool flush() { return taken(sent()); }
  __device__ __forceinline__ void close() const {
    Team::sync();  // all have read the state
    if (Team::rank() == 0) end_.state->sent = writer_.sent();
  }

 protected:
  // Counts a message and tells it.
  __device__ __forceinline__ void tell() {
    writer_.count();
    Team::sync();
    if (Team::rank() == 0) writer_.tell();
  }
  __device__ __forceinline__ bool taken(uint64 messages) {
    bool good = true;
    if (Team::rank() == 0) good = await(end_, messages, [&] { return writer_.taken(messages); });
    return Team::all(good);
  }

  const ChannelEnd end_;
  protocol::SlotWriter writer_;
};

// A receiver of messages that lie in their slots and are told by the word.
template <class Team>
class Receiver {
 public:
  __device__ __forceinline__ explicit Receiver(const ChannelEnd& end)
      : end_(end), reader_(end.arrived, end.to_credit, end.depth, end.state->received) {}

  // Where the next message is; nullptr when it is time to leave. Engines whose messages do not lie in memory as they
  // were put, unpack them to `room`.
  __device__ __forceinline__ const char* wait(void* /*room*/ = nullptr, uint64 /*bytes*/ = 0) {
    bool good = true;
    if (Team::rank() == 0) good = await(end_, reader_.received(), [&] { return reader_.there(); });
    return Team::all(good) ? slot() : nullptr;
  }
  // Behind wait(), the leader's: how many messages are there.
  __device__ __forceinline__ uint64 ready() const { return reader_.ready(); }
  // The message that wait() told of, or so many, were taken: what was read from their slots is in registers or was
  // used.
  __device__ __forceinline__ void release(uint64 messages = 1) {
    reader_.count(messages);
    Team::sync();
    if (Team::rank() == 0) reader_.tell();
  }
  __device__ __forceinline__ void close() const {
    Team::sync();
    if (Team::rank() == 0) end_.state->received = reader_.received();
  }

 protected:
  __device__ __forceinline__ const char* slot() const { return end_.slots + reader_.slot() * end_.slot_bytes; }

  const ChannelEnd end_;
  protocol::SlotReader reader_;
};

// A message through its slot.
template <class Channel>
__device__ __forceinline__ bool send(Channel& channel, const void* from, uint64 bytes) {
  return channel.open() && channel.put_with_signal(channel.slot(), from, bytes);
}

#endif

}  // namespace ark::device
