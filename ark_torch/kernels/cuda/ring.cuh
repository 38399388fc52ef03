// Rings of 128-byte lines: one ring for every ordered pair of ranks and every lane, a lane being one warp on each side.
//
// A line is 120 bytes of data and 8 of epoch, stored by eight threads of a warp at once; four lines (480 bytes of data,
// 30 units) are what a warp moves by one instruction, a *row*. A *step* of up to kStepRows rows takes one of kRingDepth
// slots in the receiver's memory. Sender and receiver of a lane count its steps; both counters live on the device and
// only grow, so a graph's replay needs no host, and a message may have any size, one that differs from pair to pair.
//
// Ordering, data: the hardware carries the 128 bytes that eight threads of a warp store to one aligned line whole
// (NCCL's LL128 rests on the same), so whoever reads the epoch of a step has its data: no fence. A slot never holds the
// awaited epoch before its data, because epochs grow and slots are zero at first. Ordering, reuse: the sender writes
// step s only when the receiver's credit word says that step s - kRingDepth was taken. The receiver stores the credit
// behind a vote over values that its loads returned; an issued store cannot overtake loads that are complete. Liveness:
// see the loops of the kernels: every rank sends before it waits, and waits for nothing that is more than kRingDepth
// steps behind what it sent. A lane waits for the same lane of peers alone, and blocks start in order of their numbers,
// so not even all blocks of a kernel need to be resident at once.
#pragma once

#include "cuda/packet.cuh"

namespace ark::device {

inline constexpr int kRingDepth = 4;
inline constexpr int kStepRows = 4;
inline constexpr int kRowUnits = 30;   // of data
inline constexpr int kRowBytes = 512;  // of memory
inline constexpr int kRowData = 16 * kRowUnits;
inline constexpr int kSlotBytes = kStepRows * kRowBytes;

// A lane's own counters towards and from one peer.
struct alignas(16) RingState {
  uint64 sent, received;
};

// A set of rings as one rank sees it. Offsets are equal on all ranks.
struct Rings {
  char* arena[kMaxRanks];  // rank r's symmetric memory as mapped here
  uint64 slots_at;         // [source rank][lane][kRingDepth] slots, written by the source
  uint64 credits_at;       // [peer][lane] words: steps that the peer has taken of what this rank sent
  uint64 state_at;         // [peer][lane] RingState, the owner's alone
  GroupStatus* status;
  uint64 limit_ns;
  uint32 lanes;  // of this set
  int rank, ranks;
  uint32 reserved;
};

// How a message lies on the lanes; sender and receiver compute it from its size. Step i of a lane begins at row
// (i * lanes + lane) * rows.
struct Spread {
  uint32 lanes, rows;
};
ARK_HOST_DEVICE constexpr Spread spread_of(uint64 bytes, uint32 most_lanes) {
  const uint64 rows = (bytes + kRowData - 1) / kRowData;
  const uint64 each = (rows + most_lanes - 1) / most_lanes;
  const uint32 step = each < 1 ? 1 : each > kStepRows ? kStepRows : static_cast<uint32>(each);
  const uint64 lanes = (rows + step - 1) / step;
  return {lanes < most_lanes ? static_cast<uint32>(lanes) : most_lanes, step};
}

#if defined(__CUDACC__)

// One warp's end of its rings. All functions are called by whole warps; those that return bool return false when it is
// time to leave.
class Lane {
 public:
  const Rings& rings;
  const int thread;
  const uint32 lane;

  __device__ __forceinline__ explicit Lane(const Rings& mine)
      : rings(mine), thread(threadIdx.x & 31), lane((blockIdx.x * blockDim.x + threadIdx.x) >> 5) {
    if (lane < rings.lanes && thread < rings.ranks) {  // thread p keeps the counters of peer p
      const uint64 at = static_cast<uint64>(thread) * rings.lanes + lane;
      load_packet(own<RingState>(rings.state_at) + at, sent_, received_);
      credit_ = load_credit(at);
      sent_before_ = sent_, received_before_ = received_;
    }
  }

  // Keeps the counters for the next launch: those that this one moved, since messages to and from other peers may be
  // under way beside it.
  __device__ __forceinline__ void close() {
    if (lane >= rings.lanes || thread >= rings.ranks) return;
    RingState* state = own<RingState>(rings.state_at) + static_cast<uint64>(thread) * rings.lanes + lane;
    if (sent_ != sent_before_) state->sent = sent_;
    if (received_ != received_before_) state->received = received_;
  }

  // The first unit of step i and whether this lane has one.
  __device__ __forceinline__ bool has(const Spread& spread, uint64 bytes, uint64 i, uint64& row) const {
    row = (i * spread.lanes + lane) * spread.rows;
    return lane < spread.lanes && row * kRowData < bytes;
  }

  // A thread's units of a step: one of each row, none for threads 15 and 31.
  __device__ __forceinline__ void load(const void* from, uint64 bytes, const Spread& spread, uint64 row,
                                       Unit (&units)[kStepRows]) const {
    const bool aligned = (reinterpret_cast<uint64>(from) & 15) == 0;
    ARK_UNROLL
    for (int j = 0; j < kStepRows; j++) {
      const uint64 unit = unit_of(row + j);
      units[j] = Unit{0, 0};
      if (j < static_cast<int>(spread.rows) && owns_unit() && unit * 16 < bytes)
        units[j] = load_unit(from, unit, bytes, aligned);
    }
  }
  __device__ __forceinline__ void store(void* to, uint64 bytes, const Spread& spread, uint64 row,
                                        const Unit (&units)[kStepRows]) const {
    const bool aligned = (reinterpret_cast<uint64>(to) & 15) == 0;
    ARK_UNROLL
    for (int j = 0; j < kStepRows; j++) {
      const uint64 unit = unit_of(row + j);
      if (j < static_cast<int>(spread.rows) && owns_unit() && unit * 16 < bytes)
        store_unit(to, unit, bytes, aligned, units[j]);
    }
  }

  __device__ __forceinline__ bool send(int peer, const Spread& spread, uint64 rows_left,
                                       const Unit (&units)[kStepRows]) {
    const uint64 step = __shfl_sync(~0u, sent_, peer);
    if (step >= __shfl_sync(~0u, credit_, peer) + kRingDepth && !await_credit(peer, step)) return false;
    char* to = slot(peer, rings.rank, step);
    ARK_UNROLL
    for (int j = 0; j < kStepRows; j++) {
      if (j >= static_cast<int>(spread.rows) || j >= rows_left) continue;
      // Units 7 and 22 are cut in two: their upper halves travel in the places of threads 15 and 31, the threads of
      // which have no unit, and the epoch in the upper halves of all four.
      const uint64 upper = __shfl_sync(~0u, units[j].hi, (thread & 16) | 7);
      const bool flag = (thread & 7) == 7;
      store_packet(to + j * kRowBytes, (thread & 15) == 15 ? upper : units[j].lo, flag ? step + 1 : units[j].hi);
    }
    if (thread == peer) sent_++;
    return true;
  }

  // Starts (or repeats) the loads of the next step from a peer.
  __device__ __forceinline__ void poll(int peer, const Spread& spread, uint64 rows_left, Unit (&raw)[kStepRows]) const {
    const char* from = slot(rings.rank, peer, __shfl_sync(~0u, received_, peer));
    ARK_UNROLL
    for (int j = 0; j < kStepRows; j++) {
      raw[j] = Unit{0, 0};
      if (j < static_cast<int>(spread.rows) && j < rows_left) load_packet(from + j * kRowBytes, raw[j].lo, raw[j].hi);
    }
  }
  // Whether this thread's share of what poll() loaded was there.
  __device__ __forceinline__ bool arrived(int peer, const Spread& spread, uint64 rows_left,
                                          const Unit (&raw)[kStepRows]) const {
    const uint64 epoch = __shfl_sync(~0u, received_, peer) + 1;
    bool there = true;
    ARK_UNROLL
    for (int j = 0; j < kStepRows; j++) {
      if (j < static_cast<int>(spread.rows) && j < rows_left && (thread & 7) == 7) there &= raw[j].hi == epoch;
    }
    return there;
  }
  __device__ __forceinline__ Unit unpacked(const Unit& raw) const {
    const uint64 upper = __shfl_sync(~0u, raw.lo, thread | 15);
    return Unit{raw.lo, (thread & 15) == 7 ? upper : raw.hi};
  }
  // The step was taken: the peer may use its slot again.
  __device__ __forceinline__ void release(int peer) {
    if (thread == peer) {
      received_++;
      auto* credits = reinterpret_cast<uint64*>(rings.arena[peer] + rings.credits_at);
      asm volatile(
          "st.relaxed.sys.global.u64 [%0], %1;" ::"l"(credits + static_cast<uint64>(rings.rank) * rings.lanes + lane),
          "l"(received_)
          : "memory");
    }
  }

  // Takes the step whose loads poll() has begun.
  __device__ __forceinline__ bool take(int peer, const Spread& spread, uint64 rows_left, Unit (&raw)[kStepRows],
                                       Unit (&units)[kStepRows]) {
    while (!__all_sync(~0u, arrived(peer, spread, rows_left, raw))) {
      if (over(peer)) return false;
      poll(peer, spread, rows_left, raw);
    }
    release(peer);
    ARK_UNROLL
    for (int j = 0; j < kStepRows; j++) units[j] = unpacked(raw[j]);
    return true;
  }
  __device__ __forceinline__ bool receive(int peer, const Spread& spread, uint64 rows_left, Unit (&units)[kStepRows]) {
    Unit raw[kStepRows];
    poll(peer, spread, rows_left, raw);
    return take(peer, spread, rows_left, raw, units);
  }

  // Counts a fruitless turn; true when it is time to leave. The whole warp gets the same answer.
  __device__ __forceinline__ bool over(int peer) {
    if ((++turns_ & 1023) != 0) return false;
    if (thread == 0) began_ = look_up(rings.status, rings.limit_ns, began_, peer, turns_);
    return __shfl_sync(~0u, began_ == kOver, 0);
  }

 private:
  __device__ __forceinline__ bool owns_unit() const { return (thread & 15) != 15; }
  __device__ __forceinline__ uint64 unit_of(uint64 row) const { return row * kRowUnits + thread - (thread >> 4); }

  template <class T>
  __device__ __forceinline__ T* own(uint64 at) const {
    return reinterpret_cast<T*>(rings.arena[rings.rank] + at);
  }
  __device__ __forceinline__ char* slot(int owner, int source, uint64 step) const {
    const uint64 number = (static_cast<uint64>(source) * rings.lanes + lane) * kRingDepth + (step & (kRingDepth - 1));
    return rings.arena[owner] + rings.slots_at + number * kSlotBytes + thread * 16;
  }
  __device__ __forceinline__ uint64 load_credit(uint64 at) const {
    uint64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];"
                 : "=l"(value)
                 : "l"(own<uint64>(rings.credits_at) + at)
                 : "memory");
    return value;
  }
  __device__ __forceinline__ bool await_credit(int peer, uint64 step) {
    for (;;) {
      if (thread == peer) credit_ = load_credit(static_cast<uint64>(peer) * rings.lanes + lane);
      if (step < __shfl_sync(~0u, credit_, peer) + kRingDepth) return true;
      if (over(peer)) return false;
    }
  }

  uint64 sent_ = 0, received_ = 0, credit_ = 0;  // of peer `thread`
  uint64 sent_before_ = 0, received_before_ = 0;
  uint64 began_ = 0;
  uint32 turns_ = 0;
};

#endif

}  // namespace ark::device
