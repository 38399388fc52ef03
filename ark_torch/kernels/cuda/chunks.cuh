// Rings in chunks, for large messages: a step's rows hold only data, and a word beside the slots counts the steps that
// have arrived. All of the link carries data, at the price of a fence before each count.
//
// Memory order: the sender's warp stores the rows. After __syncwarp() its first thread stores the count with a release
// at system scope, which orders the whole warp's stores before the count (the barrier makes them happen before it). The
// receiver's first thread loads the count with acquire, and after __syncwarp() the warp loads the rows. Waiting for the
// release stalls one warp of many.
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
  static __device__ __forceinline__ uint32 most_lanes(const Rings& rings) {
    return rings.chunk_lanes;
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
    // Loads a piece of the next step, or of the one `ahead` of it, if it has arrived.
    template <int kRows>
    __device__ __forceinline__ bool ask(const Piece<Chunks, kRows>& piece, int ahead, Unit (&raw)[kRows]) {
      const uint64 step = received_ + ahead;
      if (there_ <= step) {
        const uint64* const count = word<uint64>(rings_->rank, table_->arrived, peer_);
        // Repeated polls do not acquire, since that empties the cache of all other warps.
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
    // Waits for the data that ask() loaded. release() must not be issued before, and nothing else would delay it, so a
    // practically never taken branch depends on every value.
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
