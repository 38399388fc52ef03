// Landings: the receiver of a message tells the sender where in its registered memory the bytes go
// (csrc/collectives/cuda/registration.hpp), and the sender stores them there instead of in a ring. A receiver whose
// memory is not registered announces a null address, and the message uses the ring: every pair decides in the kernel,
// and no host needs to know what a peer passed.
//
// Both words belong to the lane: the address is a packet with an epoch (packet.cuh), the sender's "done" is a count.
// Both ends count announced messages; a message is announced only if both ends know that it will be (from
// Rings::landings_from, equal on all ranks, and the message's size).
#pragma once

#include "cuda/ring.cuh"

namespace ark::device {

// Memory order: the receiver announces after begin_kernel(), so earlier uses of the buffer are over and no earlier
// write of its own GPU is in flight. The sender's warp stores the bytes; after __syncwarp() its first thread stores the
// count with a release at system scope. The receiver loads it with acquire, and the kernel's end makes the bytes
// visible to what follows in the stream.
//
// No deadlock: a sender waits for an announcement, which a receiver makes before anything else; a receiver waits for
// data only.

#if defined(__CUDACC__)

class Landing : public LaneEnd {
 public:
  __device__ __forceinline__ void open(const Rings& mine, uint32 number, int other) {
    LaneEnd::open(mine, mine.lines, number, other);  // only the tables' number of lanes is used, which is equal in both
  }

  // Receiver: announces that bytes for this rank go to `address`; null: into the ring.
  __device__ __forceinline__ void announce(const void* address) {
    LandingState* const counts = state();
    number_ = counts->announced + 1;
    __syncwarp();
    if (thread_ != 0) return;
    counts->announced = number_;
    store_packet(rings_->arena[peer_] + rings_->landing_words.announced + 16 * at(rings_->rank),
                 reinterpret_cast<uint64>(address), number_);
  }
  // Restores the state after announce() in an end that was reopened.
  __device__ __forceinline__ void resume() { number_ = state()->announced; }
  // Waits until the sender has said that all bytes have arrived.
  __device__ __forceinline__ bool await_all() {
    const uint64* const done =
        reinterpret_cast<const uint64*>(rings_->arena[rings_->rank] + rings_->landing_words.done) + at(peer_);
    for (;;) {
      uint64 seen = thread_ == 0 ? load_word(done) : 0;
      if (__shfl_sync(~0u, seen, 0) >= number_) break;
      if (over(peer_)) return false;
    }
    uint64 seen;  // one acquire at the end, since one per poll would empty the cache of all other warps
    if (thread_ == 0) asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(done) : "memory");
    return true;
  }

  // Sender: waits for the peer's address.
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
