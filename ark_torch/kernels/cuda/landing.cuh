// Landings: where memory that the sender reaches itself takes the place of a ring. The receiver of a message says where
// the bytes are to go, as the sender sees that memory (registered memory, csrc/collectives/cuda/registration.hpp); the
// sender stores them there and says when all are there. A receiver whose memory is not registered says so by a null
// address, and the message goes by the ring: every pair decides for itself, in the kernel, and no host needs to know
// what a peer passed.
//
// Both words are the lane's: the address comes as a packet with an epoch (packet.cuh), the sender's "done" is a count.
// Both ends count the messages that began so; a message is announced only where both ends know that it will be
// (Rings::landings_from, alike on all ranks, and the message's size say so).
//
// Ordering: the receiver announces behind begin_kernel(), so whatever used the buffer before is over, and no earlier
// write of its own GPU is in flight. The sender's warp stores the bytes; behind __syncwarp() its first thread stores
// the count with release at system scope; the receiver loads it with acquire, and the kernel's end shows the bytes to
// what comes behind it in the stream.
//
// Liveness: a sender waits for an announcement, which a receiver makes first of all; a receiver waits for data alone.
#pragma once

#include "cuda/ring.cuh"

namespace ark::device {

#if defined(__CUDACC__)

class Landing : public LaneEnd {
 public:
  __device__ __forceinline__ void open(const Rings& mine, uint32 number, int other) {
    LaneEnd::open(mine, mine.lines, number, other);  // of the tables only the number of lanes is used, alike in both
  }

  // The receiver's: what is for this rank goes to `address`; null: into the ring.
  __device__ __forceinline__ void announce(const void* address) {
    LandingState* const counts = state();
    number_ = counts->announced + 1;
    __syncwarp();
    if (thread_ != 0) return;
    counts->announced = number_;
    store_packet(rings_->arena[peer_] + rings_->landing_words.announced + 16 * at(rings_->rank),
                 reinterpret_cast<uint64>(address), number_);
  }
  // In an end opened anew, as if it had announced.
  __device__ __forceinline__ void resume() { number_ = state()->announced; }
  // Until the sender has said that all is there.
  __device__ __forceinline__ bool await_all() {
    const uint64* const done =
        reinterpret_cast<const uint64*>(rings_->arena[rings_->rank] + rings_->landing_words.done) + at(peer_);
    for (;;) {
      uint64 seen = thread_ == 0 ? load_word(done) : 0;
      if (__shfl_sync(~0u, seen, 0) >= number_) break;
      if (over(peer_)) return false;
    }
    uint64 seen;  // an acquire at every turn would empty the cache of all warps beside
    if (thread_ == 0) asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(done) : "memory");
    return true;
  }

  // The sender's: where the peer wants it.
  __device__ __forceinline__ bool await_address(char*& address) {
    LandingState* const counts = state();
    const uint64 number = counts->answered + 1;
    __syncwarp();
    if (thread_ == 0) counts->answered = number;
    const char* const packet = rings_->arena[rings_->rank] + rings_->landing_words.announced + 16 * at(peer_);
    for (;;) {
      uint64 place = 0, epoch = 0;
      load_packet(packet, place, epoch);
      if (__all_sync(~0u, epoch == number)) {
        address = reinterpret_cast<char*>(place);
        return true;
      }
      if (over(peer_)) return false;
    }
  }
  __device__ __forceinline__ void tell_done() {
    __syncwarp();
    if (thread_ != 0) return;
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(
                     reinterpret_cast<uint64*>(rings_->arena[peer_] + rings_->landing_words.done) + at(rings_->rank)),
                 "l"(state()->answered)
                 : "memory");
  }

 private:
  __device__ __forceinline__ LandingState* state() const {
    return reinterpret_cast<LandingState*>(rings_->arena[rings_->rank] + rings_->landing_words.state) + at(peer_);
  }
  uint64 number_ = 0;  // the receiver's
};

#endif

}  // namespace ark::device
