// One-way channels between GPUs, driven from inside a running kernel. This file has the shared parts; each engine has a
// file:
//   channel_store.cuh        stores by all threads, a release, a flag word
//   channel_packet.cuh       16-byte packets with data and epoch: lowest latency
//   channel_bulk.cuh         TMA, driven by one thread: most bandwidth per SM; also adds and pulls
//   channel_copy_engine.cuh  copies that the host posted ahead, released by a flag: no SM moves data
//   channel_proxy.cuh        requests to a host thread, which starts a copy engine
//
// All engines share one API. Sender: open() (the next message may be written), put(to, from, bytes), signal()
// (everything put so far becomes a message), put_with_signal(), flush() (wait until everything was consumed), close()
// (saves the counters for the next launch). Receiver: wait() (for the next message), release() (it was consumed),
// close(). `to` is any memory of the peer that is mapped here. slot() is the message's place in the channel's ring. A
// bool result is false if the kernel must leave.
//
// Ordering: slots.hpp. After the team's stores and its barrier, the leader stores `arrived` with release at system
// scope, which is cumulative over what the barrier ordered. The receiver's leader loads `arrived` with acquire and
// passes the visibility on to its team by a barrier. Credits go back after the receiver's barrier.
//
// Liveness: every wait is bounded and checks for abort (Patience). A kernel waits only for the peer of its channel, so
// kernels with channels to each other must be launched so that both are resident.
#pragma once

#include "cuda/packet.cuh"
#include "slots.hpp"

namespace ark::device {

inline constexpr uint32 kLaneWords = 16;  // 128 bytes between the words of two lanes

// One end of a channel, in both directions. The peer's memory as mapped here.
struct ChannelEnd {
  char* to_slots;  // [slots] of slot_bytes each, in the peer's memory
  uint64* to_arrived;
  const uint64* credit;  // own memory
  const char* slots;     // own memory
  const uint64* arrived;
  uint64* to_credit;
  protocol::ChannelState* state;  // own memory
  GroupStatus* status;
  uint64 limit_ns;    // per wait
  uint64 slot_bytes;  // a multiple of 128
  uint32 depth;       // number of slots
  int peer;
};

// A lane is a channel of its own. The slots of lane n follow those of lane n - 1; words are kLaneWords apart.
ARK_HOST_DEVICE inline ChannelEnd lane_of(ChannelEnd end, uint32 lane) {
  const uint64 bytes = lane * end.depth * end.slot_bytes, words = lane * kLaneWords;
  end.to_slots += bytes, end.slots += bytes;
  end.to_arrived += words, end.credit += words, end.arrived += words, end.to_credit += words;
  end.state += lane;
  return end;
}

#if defined(__CUDACC__)

// The group of threads that drives an end of a channel.
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

// Spins in one thread until the condition is met or it must leave.
template <class Condition>
__device__ __forceinline__ bool await(const ChannelEnd& end, uint64 number, Condition met) {
  Patience patience{end.status, end.limit_ns};
  while (!met()) {
    if (patience.over(end.peer, number)) return false;
  }
  return true;
}

// The part of a sender that is common to all engines: all but put() and signal().
template <class Team>
class Sender {
 public:
  __device__ __forceinline__ explicit Sender(const ChannelEnd& end)
      : end_(end), writer_(end.to_arrived, end.credit, end.depth, end.state->sent) {}

  __device__ __forceinline__ uint64 sent() const { return writer_.sent(); }
  __device__ __forceinline__ char* slot() const { return end_.to_slots + writer_.slot() * end_.slot_bytes; }
  // Called by the whole team, like everything below.
  __device__ __forceinline__ bool open() {
    const uint64 due = writer_.due();
    return due == 0 || taken(due);
  }
  __device__ __forceinline__ bool flush() { return taken(sent()); }
  __device__ __forceinline__ void close() const {
    Team::sync();  // all threads have read the state
    if (Team::rank() == 0) end_.state->sent = writer_.sent();
  }

 protected:
  // Counts a message and signals it.
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

// A receiver of messages that lie in their slots and are signalled by the `arrived` word.
template <class Team>
class Receiver {
 public:
  __device__ __forceinline__ explicit Receiver(const ChannelEnd& end)
      : end_(end), reader_(end.arrived, end.to_credit, end.depth, end.state->received) {}

  // Returns the next message, or nullptr if it must leave. Engines that do not store messages in memory order unpack
  // them to `room`.
  __device__ __forceinline__ const char* wait(void* /*room*/ = nullptr, uint64 /*bytes*/ = 0) {
    bool good = true;
    if (Team::rank() == 0) good = await(end_, reader_.received(), [&] { return reader_.there(); });
    return Team::all(good) ? slot() : nullptr;
  }
  // After wait(), for the leader: the number of available messages.
  __device__ __forceinline__ uint64 ready() const { return reader_.ready(); }
  // Releases that many messages, starting with the one of wait(). Everything read from their slots must already be in
  // registers or used.
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

// Sends a message through its slot.
template <class Channel>
__device__ __forceinline__ bool send(Channel& channel, const void* from, uint64 bytes) {
  return channel.open() && channel.put_with_signal(channel.slot(), from, bytes);
}

#endif

}  // namespace ark::device
