// Rings in lines of 128 bytes: 120 of data and 8 of epoch, stored by eight threads of a warp at once. Four lines are a
// row: 480 bytes of data, 30 units. Lines signal their own arrival, so a step is available one trip over the link after
// it was stored; the epochs cost a sixteenth of the link.
//
// Memory order: the hardware transfers the 128 bytes that eight threads of a warp store to one aligned line as a whole
// (NCCL's LL128 relies on it too), so reading a line's epoch implies its data, without a fence. A slot never holds the
// awaited epoch before its data: epochs grow, and slots start as zeros.
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
  // Whether the thread has a unit of a row; threads 15 and 31 do not.
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
  static __device__ __forceinline__ uint32 most_lanes(const Rings& rings) {
    return rings.lines.lanes;
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
        // Units 7 and 22 are split: their upper halves travel in the places of threads 15 and 31, which have no unit,
        // and the epoch is in the upper halves of all four.
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
    // Whether all of what ask() loaded had arrived, now that the piece's step is the next one.
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
