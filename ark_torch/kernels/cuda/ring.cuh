// Rings of slots: one ring per ordered pair of ranks and lane. A lane is one warp on each side.
//
// A message's 16-byte units are grouped in *rows*, what a warp stores in one instruction. A *step* of several rows
// takes one of kDepth slots in the receiver's memory, and a warp works on a *piece* of a step at a time. Sender and
// receiver count a lane's steps; both counters are on the device and only grow, so a graph's replay needs no host, and
// messages may have any size, different for each pair. The protocol determines how a receiver learns of a step:
// lines.cuh (lowest latency) or chunks.cuh (highest bandwidth).
#pragma once

#include "cuda/packet.cuh"

namespace ark::device {

// Memory order and reuse: the sender writes step s only when the receiver's credit word says that step s - kDepth was
// taken. The receiver stores the credit after a vote over the values that its loads returned; an issued store cannot
// overtake completed loads.
//
// No deadlock: every message of a lane has a warp at either end, so no message waits for another, and no link is idle
// because a warp waits for data. A receiver waits for data only, a sender for credits, which receivers give. A lane
// waits only for the same lane of peers, all its warps are in one block, and blocks start in the order of their
// numbers, so not even all blocks of a kernel need to be resident at once.

inline constexpr int kRowBytes = 512;  // in memory

// A lane's own counters towards and from one peer.
struct alignas(16) RingState {
  uint64 sent, received;
};

// Offsets of one protocol's rings in each rank's symmetric memory. 0 lanes: none here.
struct RingTable {
  uint64 slots;    // [source but the owner][lane][kDepth] slots, written by the source
  uint64 arrived;  // [source][lane] words, written by the source: steps that it has stored (chunks)
  uint64 credits;  // [peer][lane] words: steps that the peer has taken of what this rank sent
  uint64 state;    // [peer][lane] RingState, used by the owner only
  uint32 lanes;
  uint32 depth;  // slots per lane if no protocol fixes it (bulk_lane.cuh): a power of 2
};

// The same for landings (landing.cuh).
struct alignas(16) LandingState {
  uint64 announced, answered;
};
struct LandingTable {
  uint64 announced;  // [receiver][lane] packets, written by the receiver
  uint64 done;       // [sender][lane] words, written by the sender
  uint64 state;      // [peer][lane] LandingState, used by the owner only
};

// A set of rings as one rank sees it.
struct Rings {
  char* arena[kMaxRanks];  // rank r's symmetric memory as mapped here
  RingTable lines, chunks, bulk;
  LandingTable landing_words;
  void* landing[kMaxRanks];  // where rank r stores what it sends to this rank, as r sees it; null: in the ring
  uint64 landings_from;      // messages of at least this size are announced; equal on all ranks
  uint64 chunks_from;        // messages of at least this size use chunks
  uint32 chunk_lanes;        // the most lanes of a message in chunks: few, to leave multiprocessors to computation
  GroupStatus* status;
  uint64 limit_ns;
  int rank, ranks;
};

// How a message is spread over lanes; sender and receiver compute it from its size. Step i of a lane starts at row (i *
// lanes + lane) * rows.
struct Spread {
  uint32 lanes, rows;
};
template <class Protocol>
ARK_HOST_DEVICE constexpr Spread spread_of(uint64 bytes, uint32 most_lanes) {
  const uint64 rows = (bytes + Protocol::kRowData - 1) / Protocol::kRowData;
  const uint64 each = (rows + most_lanes - 1) / most_lanes;
  const uint32 step = each < 1 ? 1 : each > Protocol::kStepRows ? Protocol::kStepRows : static_cast<uint32>(each);
  const uint64 lanes = (rows + step - 1) / step;
  return {lanes < most_lanes ? static_cast<uint32>(lanes) : most_lanes, step};
}

// Warps of a lane: one for what stays within the rank, one per peer to send, and one per peer to receive.
ARK_HOST_DEVICE constexpr int ring_roles(int ranks) {
  return 2 * ranks - 1;
}
// The most lanes per block: an adding warp must have registers for every rank's rows.
ARK_HOST_DEVICE constexpr int ring_lanes(int ranks) {
  return ranks <= 2 ? 4 : ranks <= 4 ? 2 : 1;
}

#if defined(__CUDACC__)

// Up to kRows rows of one step of a lane's share of a message.
template <class Protocol, int kRows>
struct Piece {
  uint64 step = 0, row = 0;
  int first = 0, rows = 0;  // among the step's rows; number of rows
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

// A warp at one end of a lane. Whole warps call all functions here and in the protocols. Waiting functions return false
// to give up.
class LaneEnd {
 public:
  __device__ __forceinline__ void open(const Rings& mine, const RingTable& table, uint32 number, int other) {
    rings_ = &mine, table_ = &table, lane_ = number, peer_ = other;
  }
  // Counts a fruitless poll; returns true to give up. The whole warp gets the same answer.
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

// The sender's end, except how bytes are stored. close() keeps its counter for the next launch.
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
  // Waits for a slot for the next step.
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

// The receiver's end, except how it learns that bytes have arrived.
class ReceiverEnd : public LaneEnd {
 public:
  __device__ __forceinline__ void open(const Rings& mine, const RingTable& table, uint32 number, int from) {
    LaneEnd::open(mine, table, number, from);
    received_ = state()->received;
  }
  __device__ __forceinline__ void close() const {
    if (thread_ == 0) state()->received = received_;
  }
  // Marks the step as taken: the peer may reuse its slot.
  __device__ __forceinline__ void release() {
    received_++;
    if (thread_ == 0) store_word(word<uint64>(peer_, table_->credits, rings_->rank), received_);
  }

 protected:
  uint64 received_ = 0;
};

#endif

}  // namespace ark::device
