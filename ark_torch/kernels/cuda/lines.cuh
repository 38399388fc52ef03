// Rings in lines of 128 bytes: 120 of data and 8 of epoch, stored by eight threads of a warp at once. Four lines are a
// row: 480 bytes of data, 30 units. What arrives tells itself, so a step is there one flight over the link after it was
// stored; the epochs cost a sixteenth of the link.
//
// Ordering: the hardware carries the 128 bytes that eight threads of a warp store to one aligned line whole (NCCL's
// LL128 rests on the same), so whoever reads the epoch of a line has its data: no fence. A slot never holds the awaited
// epoch before its data, because epochs grow and slots are zero at first.
#pragma once

#include "cuda/ring.cuh"

namespace ark::device {

struct Lines {
  static constexpr int kStepRows = 4;
  static constexpr int kDepth = 4;
  static constexpr int kRowUnits = 30;
  static constexpr int kRowData = 16 * kRowUnits;
  static constexpr int kSlotBytes = kStepRows * kRowBytes;

#if defined(__CUDACC__)
  // A thread's unit of a row; threads 15 and 31 have none.
  static __device__ __forceinline__ bool owns_unit() {
    return (threadIdx.x & 15) != 15;
  }
  static __device__ __forceinline__ uint64 unit_of(uint64 row) {
    const int thread = threadIdx.x & 31;
    return row * kRowUnits + thread - (thread >> 4);
  }
  static __device__ __forceinline__ const RingTable& table(const Rings& rings) {
    return rings.lines;
  }

  class Sender : public SenderEnd {
   public:
    template <int kRows>
    __device__ __forceinline__ bool put(const Piece<Lines, kRows>& piece, const Unit (&units)[kRows]) {
      if (!await_room(kDepth)) return false;
      char* to = slot<Lines>(peer_, rings_->rank, sent_) + piece.first * kRowBytes;
      ARK_UNROLL
      for (int j = 0; j < kRows; j++) {
        if (j >= piece.rows) continue;
        // Units 7 and 22 are cut in two: their upper halves travel in the places of threads 15 and 31, the threads of
        // which have no unit, and the epoch in the upper halves of all four.
        const uint64 upper = __shfl_sync(~0u, units[j].hi, (thread_ & 16) | 7);
        const bool flag = (thread_ & 7) == 7;
        store_packet(to + j * kRowBytes, (thread_ & 15) == 15 ? upper : units[j].lo, flag ? sent_ + 1 : units[j].hi);
      }
      return true;
    }
    __device__ __forceinline__ void end_step() { sent_++; }
  };

  class Receiver : public ReceiverEnd {
   public:
    // Starts (or repeats) the loads of a piece of the next step, or of the one `ahead` of it.
    template <int kRows>
    __device__ __forceinline__ bool ask(const Piece<Lines, kRows>& piece, int ahead, Unit (&raw)[kRows]) const {
      const char* from = slot<Lines>(rings_->rank, peer_, received_ + ahead) + piece.first * kRowBytes;
      ARK_UNROLL
      for (int j = 0; j < kRows; j++) {
        raw[j] = Unit{0, 0};
        if (j < piece.rows) load_packet(from + j * kRowBytes, raw[j].lo, raw[j].hi);
      }
      return false;
    }
    // Whether all of what ask() loaded was there, now that the piece's step is the next one.
    template <int kRows>
    __device__ __forceinline__ bool arrived(const Piece<Lines, kRows>& piece, bool, const Unit (&raw)[kRows]) const {
      bool there = true;
      ARK_UNROLL
      for (int j = 0; j < kRows; j++) {
        if (j < piece.rows && (thread_ & 7) == 7) there &= raw[j].hi == received_ + 1;
      }
      return __all_sync(~0u, there);
    }
    static __device__ __forceinline__ Unit unpacked(const Unit& raw) {
      const uint64 upper = __shfl_sync(~0u, raw.lo, (threadIdx.x & 31) | 15);
      return Unit{raw.lo, (threadIdx.x & 15) == 7 ? upper : raw.hi};
    }
  };
#endif
};

}  // namespace ark::device
