// Rings of slots: one ring for every ordered pair of ranks and every lane, a lane being one warp on each side.
//
// A message's units of 16 bytes go in *rows*, what a warp stores by one instruction; a *step* of some rows takes one of
// kDepth slots in the receiver's memory, and a warp works on a *piece* of a step at a time. Sender and receiver of a
// lane count its steps; both counters live on the device and only grow, so a graph's replay needs no host, and a
// message may have any size, one that differs from pair to pair. How a receiver knows that a step is there is the
// protocol's: lines.cuh (soonest) and chunks.cuh (most bytes a second).
//
// Ordering, reuse: the sender writes step s only when the receiver's credit word says that step s - kDepth was
// taken. The receiver stores the credit behind a vote over values that its loads returned; an issued store cannot
// overtake loads that are complete.
//
// Liveness: every message of a lane has a warp at either end, so no message waits for another and the link is not idle
// because a warp waits for data. A receiver waits for data alone; a sender waits for credits, which receivers give. A
// lane waits for the same lane of peers alone, all its warps are of one block, and blocks start in order of their
// numbers, so not even all blocks of a kernel need to be resident at once.
#pragma once

#include "cuda/packet.cuh"

namespace ark::device {

inline constexpr int kRowBytes = 512;  // of memory

// A lane's own counters towards and from one peer.
struct alignas(16) RingState {
  uint64 sent, received;
};

// Where the rings of one protocol lie in the symmetric memory of each rank. 0 lanes: it has none here.
struct RingTable {
  uint64 slots;    // [source but the owner][lane][kDepth] slots, written by the source
  uint64 arrived;  // [source][lane] words, written by the source: steps that it has put there (chunks)
  uint64 credits;  // [peer][lane] words: steps that the peer has taken of what this rank sent
  uint64 state;    // [peer][lane] RingState, the owner's alone
  uint32 lanes;
  uint32 depth;  // slots of a lane where no protocol fixes it (bulk_lane.cuh): a power of 2
};

// The same for landings (landing.cuh).
struct alignas(16) LandingState {
  uint64 announced, answered;
};
struct LandingTable {
  uint64 announced;  // [receiver][lane] packets, written by the receiver
  uint64 done;       // [sender][lane] words, written by the sender
  uint64 state;      // [peer][lane] LandingState, the owner's alone
};

// A set of rings as one rank sees it.
struct Rings {
  char* arena[kMaxRanks];  // rank r's symmetric memory as mapped here
  RingTable lines, chunks, bulk;
  LandingTable landing_words;
  void* landing[kMaxRanks];  // where rank r is to store what it has for this rank, as r sees it; null: in the ring
  uint64 landings_from;      // messages of so many bytes and more are announced; alike on all ranks
  uint64 chunks_from;        // messages of so many bytes and more are sent in chunks
  GroupStatus* status;
  uint64 limit_ns;
  int rank, ranks;
};

// How a message lies on the lanes; sender and receiver compute it from its size. Step i of a lane begins at row
// (i * lanes + lane) * rows.
struct Spread {
  uint32 lanes, rows;
};
// Longer messages are cut by the caller, a launch each: lanes drift apart by as much as they like, and over a message
// of 256 MB that is more pages under way at once than address translation holds (H200: ten times slower). Sums whose
// results go out in the same launch are cut sooner (CudaDispatch::part_bytes).
inline constexpr uint64 kMostMessageBytes = uint64{64} << 20;
template <class Protocol>
ARK_HOST_DEVICE constexpr Spread spread_of(uint64 bytes, uint32 most_lanes) {
  const uint64 rows = (bytes + Protocol::kRowData - 1) / Protocol::kRowData;
  const uint64 each = (rows + most_lanes - 1) / most_lanes;
  const uint32 step = each < 1 ? 1 : each > Protocol::kStepRows ? Protocol::kStepRows : static_cast<uint32>(each);
  const uint64 lanes = (rows + step - 1) / step;
  return {lanes < most_lanes ? static_cast<uint32>(lanes) : most_lanes, step};
}

// Warps of a lane: one for what stays within the rank, one for what goes to every peer, one for what comes from it.
ARK_HOST_DEVICE constexpr int ring_roles(int ranks) {
  return 2 * ranks - 1;
}
// Lanes of a block, at most: so many that a warp that adds has registers for every rank's rows.
ARK_HOST_DEVICE constexpr int ring_lanes(int ranks) {
  return ranks <= 2 ? 4 : ranks <= 4 ? 2 : 1;
}

#if defined(__CUDACC__)

// Up to kRows rows of one step of a lane's share of a message.
template <class Protocol, int kRows>
struct Piece {
  uint64 step = 0, row = 0;
  int first = 0, rows = 0;  // of the step's rows; how many
  bool there = false;

  __device__ __forceinline__ void find(const Spread& spread, uint32 lane, uint64 bytes) {
    const uint64 all = (bytes + Protocol::kRowData - 1) / Protocol::kRowData;
    if (first >= static_cast<int>(spread.rows)) step++, first = 0;
    row = (step * spread.lanes + lane) * spread.rows + first;
    there = lane < spread.lanes && row < all;
    rows = static_cast<int>(min(all - row, uint64{min(spread.rows - first, uint32{kRows})}));
  }
  __device__ __forceinline__ Piece after(const Spread& spread, uint32 lane, uint64 bytes) const {
    Piece next = *this;
    next.first += kRows;
    next.find(spread, lane, bytes);
    return next;
  }
};

// A warp at one end of a lane. All functions here and of the protocols are called by whole warps; those that return
// bool about waiting return false when it is time to leave.
class LaneEnd {
 public:
  __device__ __forceinline__ void open(const Rings& mine, const RingTable& table, uint32 number, int other) {
    rings_ = &mine, table_ = &table, lane_ = number, peer_ = other;
  }
  // Counts a fruitless turn; true when it is time to leave. The whole warp gets the same answer.
  __device__ __forceinline__ bool over(int peer) {
    if ((++turns_ & 1023) != 0) return false;
    if (thread_ == 0) began_ = look_up(rings_->status, rings_->limit_ns, began_, peer, turns_);
    return __shfl_sync(~0u, began_ == kOver, 0);
  }

 protected:
  __device__ __forceinline__ uint64 at(int peer) const { return static_cast<uint64>(peer) * table_->lanes + lane_; }
  template <class T>
  __device__ __forceinline__ T* word(int owner, uint64 table, int peer) const {
    return reinterpret_cast<T*>(rings_->arena[owner] + table) + at(peer);
  }
  __device__ __forceinline__ RingState* state() const { return word<RingState>(rings_->rank, table_->state, peer_); }
  template <class Protocol>
  __device__ __forceinline__ char* slot(int owner, int source, uint64 step) const {
    const uint64 number = at(source - (source > owner)) * Protocol::kDepth + step % Protocol::kDepth;
    return rings_->arena[owner] + table_->slots + number * Protocol::kSlotBytes + thread_ * 16;
  }
  static __device__ __forceinline__ uint64 load_word(const uint64* from) {
    uint64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
  }
  static __device__ __forceinline__ void store_word(uint64* to, uint64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
  }

  const Rings* rings_ = nullptr;
  const RingTable* table_ = nullptr;
  uint32 lane_ = 0;
  int peer_ = 0;
  const int thread_ = threadIdx.x & 31;

 private:
  uint64 began_ = 0;
  uint32 turns_ = 0;
};

// The sender's end but for how bytes are stored. Keeps its counter for the next launch by close().
class SenderEnd : public LaneEnd {
 public:
  __device__ __forceinline__ void open(const Rings& mine, const RingTable& table, uint32 number, int to) {
    LaneEnd::open(mine, table, number, to);
    sent_ = state()->sent;
    load_credit();
  }
  __device__ __forceinline__ void close() const {
    if (thread_ == 0) state()->sent = sent_;
  }
  // Until the next step has a slot.
  __device__ __forceinline__ bool await_room(int depth) {
    while (sent_ >= credit_ + depth) {
      if (over(peer_)) return false;
      load_credit();
    }
    return true;
  }

 protected:
  uint64 sent_ = 0;

 private:
  __device__ __forceinline__ void load_credit() {
    credit_ = load_word(word<uint64>(rings_->rank, table_->credits, peer_));
  }
  uint64 credit_ = 0;
};

// The receiver's end but for how it knows that bytes are there.
class ReceiverEnd : public LaneEnd {
 public:
  __device__ __forceinline__ void open(const Rings& mine, const RingTable& table, uint32 number, int from) {
    LaneEnd::open(mine, table, number, from);
    received_ = state()->received;
  }
  __device__ __forceinline__ void close() const {
    if (thread_ == 0) state()->received = received_;
  }
  // The step was taken: the peer may use its slot again.
  __device__ __forceinline__ void release() {
    received_++;
    if (thread_ == 0) store_word(word<uint64>(peer_, table_->credits, rings_->rank), received_);
  }

 protected:
  uint64 received_ = 0;
};

#endif

}  // namespace ark::device
