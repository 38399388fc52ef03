// Channels over the bulk copy engine, in two forms. BulkSender: one thread puts, waits and signals, for the lowest
// latency of single messages. BulkStream: one thread moves data and never stops for a fence, while another signals what
// has arrived and fetches credits, several messages at a time, for the most bandwidth with few SMs. Pull: the sender
// only signals, and the receiver's BulkMover loads from the peer's memory between wait() and release(). Add: kOp.
//
// Ordering. The mover's wait_group tells when bytes are written. An operation of the engine ends with a proxy fence, so
// the mover sees them like its own stores. BulkSender then stores `arrived` with release. In a stream, the mover stores
// the count to shared memory with release (block scope). The signalling thread acquires it and stores `arrived` with
// release at system scope, which is cumulative. Credits take the same two steps in the other direction.
//
// Liveness. A mover that finds no free slot first stores and signals everything it has, so that the receiver never
// waits for a message that this end holds back. The signalling thread ends when the mover closes or leaves.
#pragma once

#include "bulk_mover.cuh"
#include "channel.cuh"

namespace ark::device {

#if defined(__CUDACC__)

template <class Stages, BulkOp kOp = BulkOp::copy>
class BulkSender : public Sender<OneThread> {
 public:
  // The caller has prepared the stages with BulkMover::prepare().
  __device__ __forceinline__ BulkSender(const ChannelEnd& end, Stages& shared)
      : Sender<OneThread>(end), mover_(shared) {}

  __device__ __forceinline__ bool put(void* to, const void* from, uint64 bytes) {
    mover_.source_changed();
    mover_.put(to, from, bytes);
    return true;
  }
  __device__ __forceinline__ void reusable() { mover_.reusable(); }
  __device__ __forceinline__ bool signal() {
    mover_.written();
    tell();
    return true;
  }
  __device__ __forceinline__ bool put_with_signal(void* to, const void* from, uint64 bytes) {
    return put(to, from, bytes) && signal();
  }

 private:
  BulkMover<kOp, Stages> mover_;
};

inline constexpr uint64 kLastOfStream = uint64{1} << 63;  // flag in `written`: nothing follows

// The mover's end. The moving thread calls prepare(), the block synchronizes, then the thread constructs the stream
// while a thread of another warp runs tell_stream(). Call source_changed() before a put() of data that ordinary stores
// wrote.
template <class Stages, BulkOp kOp = BulkOp::copy>
class BulkStream : private BulkMover<kOp, Stages> {
 public:
  static __device__ __forceinline__ void prepare(const ChannelEnd& end, Stages& shared) {
    BulkMover<kOp, Stages>::prepare(shared);
    shared.written = end.state->sent;
    for (int i = 0; i < Stages::kStages; i++) shared.finished[i] = shared.written;
    shared.credit = 0;
  }
  __device__ __forceinline__ BulkStream(const ChannelEnd& end, Stages& shared)
      : BulkMover<kOp, Stages>(shared),
        end_(end),
        sent_(end.state->sent),
        slot_(static_cast<uint32>(protocol::slot_of(sent_, end.depth))) {}
  using BulkMover<kOp, Stages>::source_changed;

  __device__ __forceinline__ char* slot() const { return end_.to_slots + slot_ * end_.slot_bytes; }
  __device__ __forceinline__ bool open() { return taken(protocol::needed_to_write(sent_, end_.depth)); }
  __device__ __forceinline__ bool put(void* to, const void* from, uint64 bytes) {
    BulkMover<kOp, Stages>::put(to, from, bytes, sent_, [&] { note(); });
    return true;
  }
  __device__ __forceinline__ bool signal() {
    sent_++;
    slot_ = slot_ + 1 == end_.depth ? 0 : slot_ + 1;  // a division would take as long as a chunk
    const uint32 last = this->load_stage_ == 0 ? Stages::kStages - 1 : this->load_stage_ - 1;
    if (this->ahead_ != 0) this->shared_.finished[last] = sent_;  // otherwise push() signals it
    return true;
  }
  __device__ __forceinline__ bool put_with_signal(void* to, const void* from, uint64 bytes) {
    return put(to, from, bytes) && signal();
  }
  // Makes sure that everything put so far gets signalled, even if nothing follows.
  __device__ __forceinline__ void push() {
    this->written();
    store_block(this->shared_.written, sent_);
  }
  __device__ __forceinline__ bool flush() { return taken(sent_); }
  // Also required if it had to leave.
  __device__ __forceinline__ void close() {
    this->written();
    store_block(this->shared_.written, sent_ | kLastOfStream);
    end_.state->sent = sent_;
  }

 private:
  // Records what is written, except for the chunks still in flight. Once every few chunks.
  __device__ __forceinline__ void note() {
    constexpr int kPending = BulkMover<kOp, Stages>::kPending;
    if (this->store_stage_ % 4 != 0) return;
    bulk_wait_written<kPending>();
    const uint32 newest = this->store_stage_ + Stages::kStages - 1;
    store_block(this->shared_.written, this->shared_.finished[(newest - kPending) % Stages::kStages]);
  }
  __device__ __forceinline__ bool taken(uint64 messages) {
    if (credit_ >= messages) return true;
    credit_ = load_block(this->shared_.credit);
    if (credit_ >= messages) return true;
    push();
    return await(end_, messages, [&] {
      credit_ = load_block(this->shared_.credit);
      return credit_ >= messages;
    });
  }

  const ChannelEnd end_;
  uint64 sent_, credit_ = 0;
  uint32 slot_;
};

// The whole loop of the signalling thread. It returns when the mover has closed the stream.
template <class Stages>
__device__ __forceinline__ void tell_stream(const ChannelEnd& end, Stages& shared) {
  // The mover bounds its waits and closes when it leaves, so this thread only checks for abort.
  Patience patience{end.status, ~uint64{0} >> 1};
  uint64 told = kLastOfStream;  // not a valid count
  while (!patience.over(end.peer, told)) {
    store_block(shared.credit, protocol::load_acquire(*end.credit));
    const uint64 written = load_block(shared.written), messages = written & ~kLastOfStream;
    if (messages != told) protocol::store_release(*end.to_arrived, told = messages);
    if (written != messages) return;
  }
}

#endif

}  // namespace ark::device
