// Rings in chunks: a step's rows hold nothing but data, and a word beside the slots counts the steps that are there.
// All of the link is data, for the price of a fence before each count: large messages.
//
// Ordering: the sender's warp stores the rows; behind __syncwarp() its first thread stores the count with release at
// system scope, which orders the stores of the whole warp (they happen before it by the barrier) before the count. The
// receiver's first thread loads the count with acquire, and behind __syncwarp() the warp loads the rows. Waiting for
// the release stops one warp of many.
#pragma once

#include "cuda/ring.cuh"

namespace ark::device {

struct Chunks {
  static constexpr int kStepRows = 16;
  static constexpr int kDepth = 4;
  static constexpr int kRowUnits = 32;
  static constexpr int kRowData = 16 * kRowUnits;
  static constexpr int kSlotBytes = kStepRows * kRowBytes;

#if defined(__CUDACC__)
  static __device__ __forceinline__ bool owns_unit() {
    return true;
  }
  static __device__ __forceinline__ uint64 unit_of(uint64 row) {
    return row * kRowUnits + (threadIdx.x & 31);
  }
  static __device__ __forceinline__ const RingTable& table(const Rings& rings) {
    return rings.chunks;
  }

  class Sender : public SenderEnd {
   public:
    template <int kRows>
    __device__ __forceinline__ bool put(const Piece<Chunks, kRows>& piece, const Unit (&units)[kRows]) {
      if (!await_room(kDepth)) return false;
      char* to = slot<Chunks>(peer_, rings_->rank, sent_) + piece.first * kRowBytes;
      ARK_UNROLL
      for (int j = 0; j < kRows; j++) {
        if (j < piece.rows) store_packet(to + j * kRowBytes, units[j].lo, units[j].hi);
      }
      return true;
    }
    __device__ __forceinline__ void end_step() {
      sent_++;
      __syncwarp();
      if (thread_ == 0) {
        asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word<uint64>(peer_, table_->arrived, rings_->rank)),
                     "l"(sent_)
                     : "memory");
      }
      __syncwarp();
    }
  };

  class Receiver : public ReceiverEnd {
   public:
    // Loads a piece of the next step, or of the one `ahead` of it, if it is there.
    template <int kRows>
    __device__ __forceinline__ bool ask(const Piece<Chunks, kRows>& piece, int ahead, Unit (&raw)[kRows]) {
      const uint64 step = received_ + ahead;
      if (there_ <= step) {
        const uint64* const count = word<uint64>(rings_->rank, table_->arrived, peer_);
        // A second and further look in vain is without acquire, which empties the cache of all warps beside.
        if (thread_ == 0 && (!in_vain_ || load_word(count) > step))
          asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(there_) : "l"(count) : "memory");
        __syncwarp();
        there_ = __shfl_sync(~0u, there_, 0);
      }
      in_vain_ = there_ <= step;
      if (in_vain_) return false;
      const char* from = slot<Chunks>(rings_->rank, peer_, step) + piece.first * kRowBytes;
      ARK_UNROLL
      for (int j = 0; j < kRows; j++) {
        raw[j] = Unit{0, 0};
        if (j < piece.rows) load_packet(from + j * kRowBytes, raw[j].lo, raw[j].hi);
      }
      return true;
    }
    // Waits for what ask() loaded: release() must not be issued before the values are here, and nothing else would hold
    // it back. So a branch hangs on every value, one that is as good as never taken.
    template <int kRows>
    __device__ __forceinline__ bool arrived(const Piece<Chunks, kRows>&, bool loaded, const Unit (&raw)[kRows]) const {
      if (!loaded) return false;
      uint64 digest = 0;
      ARK_UNROLL
      for (int j = 0; j < kRows; j++) digest ^= raw[j].lo ^ raw[j].hi;
      if (__any_sync(~0u, digest == 0x9d3c5a71e6b28f04ull)) __threadfence_system();
      return true;
    }
    static __device__ __forceinline__ Unit unpacked(const Unit& raw) { return raw; }

   private:
    uint64 there_ = 0;
    bool in_vain_ = false;
  };
#endif
};

}  // namespace ark::device
