// Bulk rings: the copy engines (TMA) of a few SMs fill and empty the slots, one lane per block. Bytes are in shared
// memory instead of registers (ring.cuh), so 16 blocks fill a link for which warps need 128, and computation keeps SMs.
//
// A message is cut into chunks of 8 KB. Chunk i of block b is number i * blocks + b of the message, is step i of that
// lane, and takes one of `depth` slots in the receiver's memory. Each warp has one task. A mover (bulk_pump()) loads
// chunks into stages of shared memory several ahead of the oldest one that it stores. It never stops for a fence:
// a telling warp publishes what is written, and a fetching warp fetches credits.
#pragma once

#include "cuda/bulk_copy.cuh"
#include "cuda/ring.cuh"

namespace ark::device {

// Memory order. Bytes are written once the storing thread's wait_group returns. It then stores the count of steps to
// shared memory with release; the telling warp acquires it and stores `arrived` with a release at system scope, which
// is cumulative. The receiver acquires `arrived`, and a proxy fence precedes its engine's loads. The receiver gives
// credits when the mbarrier says that the slot was read; the sender's fetching warp acquires them.
//
// The mover's warp uses ordinary accesses for what the engine cannot move: unaligned user buffers, and the bytes after
// the last multiple of 16. Slots are aligned, and a chunk in a slot is padded.
//
// Pace. A rank's lanes drift apart, and then each of them touches its own pages, which makes large messages several
// times slower (docs/measurements.md). So a sending mover starts a window of steps only when every lane has started the
// one before (BulkPace). The wait is bounded: if a lane's block is not running yet, the others go on without it. With
// 48 lanes and more it does not help from 64 MB on.
//
// No deadlock. Waits for peers are bounded; whoever gives up sets the abort word, on which all other warps leave. A
// mover that finds no room, or nothing to take, first stores and publishes all it has. So of all warps that wait for a
// peer, the one with the lowest step proceeds: a sender waits until steps `depth` before its own are taken, a receiver
// for data.

// Bandwidth. A block moves what its stages hold in each latency, however that is cut into chunks. A store to a peer
// keeps its stage about twice as long as a load does, so a sender has two stages for stores to one for loads
// (bulk_ahead()); of a taker, both ends are local. A sender also has the stages of a taker that has nothing to take.
//
// A sender publishes a step once a few later ones are stored, latency times bandwidth again, but at most a quarter of
// the ring (bulk_lag(); sums of few chunks a ring, half of it): a receiver gives credits only for what it has been told
// of, so the rest of the ring must last for the way there and back, and a sender whose ring is full waits until all its
// stores are written. For the same reason one warp tells and another fetches credits: each access of theirs takes as
// long as a step.

inline constexpr uint32 kBulkChunk = 8192;
inline constexpr int kBulkStages = 27;
inline constexpr uint32 kBulkSharedBytes = (kBulkStages + 1) * kBulkChunk;  // the last one for barriers and words
inline constexpr uint32 kMostRingBlocks = 64;

// Of so many stages, those that are loaded ahead of the oldest that is stored.
ARK_HOST_DEVICE constexpr uint32 bulk_ahead(uint32 stages, bool to_peers) {
  return to_peers ? (stages < 6 ? 2 : (stages + 1) / 3) : (stages + 1) / 2;
}
// Of so many stages, those of the taker; the others are the sender's.
ARK_HOST_DEVICE constexpr uint32 bulk_taken(uint32 stages) {
  return stages * 2 / 5;
}
// Stores that may be in flight when the one before them is published: 12, 8, 4, 2 or 1. `chunks`: that a ring holds;
// `each`: stores that a chunk takes.
inline constexpr uint32 kBulkMostLag = 12;
ARK_HOST_DEVICE constexpr uint32 bulk_lag(uint32 chunks, uint32 each) {
  const uint64 most = uint64{chunks / 4} * each;
  return most >= kBulkMostLag ? kBulkMostLag : most >= 8 ? 8 : most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

// This block's part of a message. kSlots: slots that a chunk takes, one after another.
template <uint32 kSlots = 1>
struct BulkShare {
  static constexpr uint32 kChunk = kSlots * kBulkChunk;
  uint64 bytes;  // of the whole message
  uint32 block, blocks;

  ARK_HOST_DEVICE constexpr uint32 steps() const {
    const uint64 chunks = (bytes + kChunk - 1) / kChunk;
    return chunks > block ? static_cast<uint32>((chunks - block + blocks - 1) / blocks) : 0;
  }
  ARK_HOST_DEVICE constexpr uint64 at(uint32 step) const { return (uint64{step} * blocks + block) * kChunk; }
  // 0 after the last step.
  ARK_HOST_DEVICE constexpr uint32 size(uint32 step) const {
    const uint64 from = at(step);
    return from >= bytes ? 0 : bytes - from < kChunk ? static_cast<uint32>(bytes - from) : kChunk;
  }
};

// Communication between a mover, its telling and its fetching warp, in shared memory, for the lanes of one set of
// rings.
struct BulkWords {
  uint64 written;  // steps of this launch
  uint64 credit[kMaxRanks];
  uint64 paced;  // windows of steps that every lane of this rank has started in this launch
  uint32 apart;  // bit r: rank r does not use the ring; set before anything is written
};

#if defined(__CUDACC__)

ARK_DEVICE_INLINE uint32 padded(uint32 bytes) {
  return (bytes + 15) & ~15u;
}

// A lane of one set of rings, as one rank sees it. A launch uses as many lanes as it has blocks.
struct BulkRing {
  const Rings& rings;
  uint32 lane;

  __device__ __forceinline__ uint64 at(int peer) const { return static_cast<uint64>(peer) * rings.bulk.lanes + lane; }
  __device__ __forceinline__ uint64* arrived(int owner, int peer) const {
    return word(owner, rings.bulk.arrived, peer);
  }
  __device__ __forceinline__ uint64* credit(int owner, int peer) const { return word(owner, rings.bulk.credits, peer); }
  __device__ __forceinline__ RingState* state(int peer) const {
    return reinterpret_cast<RingState*>(rings.arena[rings.rank] + rings.bulk.state) + at(peer);
  }
  // Windows that a lane of this rank has ever started. Stored in the state towards itself, which no message needs.
  __device__ __forceinline__ uint64* pace(uint32 of) const {
    auto* const states = reinterpret_cast<RingState*>(rings.arena[rings.rank] + rings.bulk.state);
    return &states[static_cast<uint64>(rings.rank) * rings.bulk.lanes + of].sent;
  }
  __device__ __forceinline__ char* slot(int owner, int source, uint64 step) const {
    const uint64 number = at(source - (source > owner)) * rings.bulk.depth + (step & (rings.bulk.depth - 1));
    return rings.arena[owner] + rings.bulk.slots + number * kBulkChunk;
  }

 private:
  __device__ __forceinline__ uint64* word(int owner, uint64 table, int peer) const {
    return reinterpret_cast<uint64*>(rings.arena[owner] + table) + at(peer);
  }
};

// The operations of a warp with its own task. The whole warp calls every function.
class BulkWarp {
 public:
  __device__ __forceinline__ explicit BulkWarp(const Rings& rings) : rings_(rings) {}

  __device__ __forceinline__ bool leads() const { return thread() == 0; }
  static __device__ __forceinline__ int thread() { return threadIdx.x & 31; }

  // Counts a fruitless poll; returns true if the wait must be given up. Without a peer only abort ends the wait.
  __device__ __forceinline__ bool over(int peer) { return over(peer, rings_.limit_ns); }
  __device__ __forceinline__ bool over() { return over(rings_.rank, ~uint64{0} >> 1); }
  // Waits for this block or the hardware.
  __device__ __forceinline__ bool await(uint64* barrier, uint32 parity) {
    while (!__all_sync(~0u, barrier_passed_soon(barrier, parity))) {
      if (over()) return false;
    }
    return true;
  }

  // Copies to the stage what the engine cannot load. Returns the number of bytes that it can.
  __device__ __forceinline__ uint32 load_rest(char* stage, const char* from, uint32 bytes) const {
    const bool aligned = (reinterpret_cast<uint64>(from) & 15) == 0;
    const uint32 whole = aligned ? bytes & ~15u : 0;
    if (whole < bytes) {
#pragma unroll 1
      for (uint32 at = whole + thread() * 16; at < bytes; at += 512)
        *reinterpret_cast<Unit*>(stage + at) = load_unit(from, at / 16, bytes, aligned);
      fence_async_shared();
      __syncwarp();
    }
    return whole;
  }
  __device__ __forceinline__ void load(char* stage, uint64* full, const char* from, uint32 bytes) const {
    const uint32 whole = load_rest(stage, from, bytes);
    if (!leads()) return;
    barrier_expect(full, whole);
    if (whole != 0) bulk_load(stage, from, whole, full);
  }
  // Stores a whole chunk; the leader commits.
  __device__ __forceinline__ void store(char* to, const char* stage, uint32 bytes) const {
    const bool aligned = (reinterpret_cast<uint64>(to) & 15) == 0;
    const uint32 whole = aligned ? bytes & ~15u : 0;
    if (leads() && whole != 0) bulk_store(to, stage, whole);
    if (whole < bytes) {
#pragma unroll 1
      for (uint32 at = whole + thread() * 16; at < bytes; at += 512)
        store_unit(to, at / 16, bytes, aligned, *reinterpret_cast<const Unit*>(stage + at));
      __syncwarp();
    }
  }

  // Publishes `steps` as written once all but the last kPending groups that the leader committed are.
  template <int kPending>
  __device__ __forceinline__ void publish(BulkWords& words, uint32 steps) {
    __syncwarp();
    if (leads()) {
      bulk_wait_written<kPending>();
      if (steps > published_) store_block(words.written, steps);
    }
    published_ = max(published_, steps);
    __syncwarp();
  }
  // The same for a bulk_lag().
  __device__ __forceinline__ void publish(uint32 pending, BulkWords& words, uint32 steps) {
    if (pending == kBulkMostLag) return publish<kBulkMostLag>(words, steps);
    if (pending == 8) return publish<8>(words, steps);
    if (pending == 4) return publish<4>(words, steps);
    if (pending == 2) return publish<2>(words, steps);
    publish<1>(words, steps);
  }
  // Waits for the slots of step `step` of this launch: from slot `number` of the ring to this peer on, over all
  // launches.
  template <uint32 kSlots = 1>
  __device__ __forceinline__ bool await_room(BulkWords& words, int peer, uint64 number, uint32 step) {
    const uint64 last = number + kSlots - 1;
    const auto full = [&] { return __any_sync(~0u, last >= load_block(words.credit[peer]) + rings_.bulk.depth); };
    if (!full()) return true;
    publish<0>(words, step);
    while (full()) {
      if (over(peer)) return false;
    }
    return true;
  }

 private:
  __device__ __forceinline__ bool over(int peer, uint64 limit_ns) {
    if ((++turns_ & 1023) != 0) return false;
    if (leads()) began_ = look_up(rings_.status, limit_ns, began_, peer, turns_);
    return __shfl_sync(~0u, began_ == kOver, 0);
  }

  const Rings& rings_;
  uint64 began_ = 0;
  uint32 turns_ = 0, published_ = 0;
};

// Keeps a sending mover's steps close to those of this rank's other lanes. All lanes count the same number of windows
// per launch, however few steps they have, so that all counts are equal between launches. A launch may have fewer
// blocks than there are lanes; its blocks count for the others.
class BulkPace {
 public:
  // `base`: the lane's count before this launch; `most`: steps of the lane with the most.
  __device__ __forceinline__ BulkPace(const BulkRing& ring, BulkWords& words, uint64 base, uint32 most)
      : ring_(ring), words_(words), base_(base), windows_(most / kWindow + 1) {}

  // Whether this step may start. The whole warp gets the same answer.
  __device__ __forceinline__ bool may_begin(uint32 step) {
    const uint32 window = step / kWindow;
    if (window > begun_) tell(ring_.lane, begun_ = window);
    if (window < allowed_) return true;
    uint64 now = 0;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (since_ == 0) since_ = now;
    const bool goes_on = window < load_block(words_.paced) + 2 || now - since_ > kPatienceNs;
    if (__shfl_sync(~0u, goes_on, 0) == 0) return false;
    allowed_ = window + 1, since_ = 0;
    return true;
  }
  __device__ __forceinline__ void close() {
    for (uint32 lane = ring_.lane; lane < ring_.rings.bulk.lanes; lane += gridDim.x) tell(lane, windows_);
  }

  // For the fetching warp: updates what all lanes have started since `base`.
  static __device__ __forceinline__ void look(const BulkRing& ring, BulkWords& words, uint64 base) {
    uint32 least = ~0u;
    for (uint32 lane = BulkWarp::thread(); lane < gridDim.x; lane += 32)
      least = min(least, static_cast<uint32>(protocol::load_relaxed(*ring.pace(lane)) - base));
    least = __reduce_min_sync(~0u, least);
    if (BulkWarp::thread() == 0) store_block(words.paced, least);
  }

 private:
  static constexpr uint32 kWindow = 8;
  static constexpr uint64 kPatienceNs = 50'000;

  __device__ __forceinline__ void tell(uint32 lane, uint32 windows) {
    if (BulkWarp::thread() == 0) protocol::store_relaxed(*ring_.pace(lane), base_ + windows);
  }

  const BulkRing& ring_;
  BulkWords& words_;
  const uint64 base_;
  const uint32 windows_;
  uint64 since_ = 0;
  uint32 begun_ = 0, allowed_ = 2;
};

// The work of the telling and of the fetching warp for the lane of one set of rings. Thread r does it for peer r.
template <uint32 kSlots = 1>
class BulkTeller {
 public:
  // `sent`: slots to this thread's peer before this launch; `steps`: to this thread's peer; `total`: that the mover
  // will publish.
  __device__ __forceinline__ BulkTeller(const BulkRing& ring, BulkWords& words, uint64 sent, uint32 steps, uint32 total)
      : ring_(ring), words_(words), sent_(sent), steps_(steps), total_(total) {}

  // Tells the peer how many of its steps are written. Returns whether all are.
  __device__ __forceinline__ bool tell() {
    const uint64 written = load_block(words_.written), now = min(written, uint64{steps_});
    if (is_peer() && now != told_ && (words_.apart >> peer_ & 1) == 0)
      protocol::store_release(*ring_.arrived(peer_, ring_.rings.rank), sent_ + (told_ = now) * kSlots);
    return __all_sync(~0u, written == total_);
  }
  // Fetches the peer's credits. Returns whether all is written, so that none are needed.
  __device__ __forceinline__ bool fetch() {
    const uint64 written = load_block(words_.written);
    if (__all_sync(~0u, written == total_)) return true;
    if (is_peer()) store_block(words_.credit[peer_], protocol::load_acquire(*ring_.credit(ring_.rings.rank, peer_)));
    __syncwarp();
    return false;
  }

 private:
  __device__ __forceinline__ bool is_peer() const { return peer_ < ring_.rings.ranks && peer_ != ring_.rings.rank; }

  const BulkRing& ring_;
  BulkWords& words_;
  const uint64 sent_;
  const uint32 steps_, total_;
  const int peer_ = BulkWarp::thread();
  uint64 told_ = 0;
};

// Some of the stages, as the array of their own that a mover takes.
template <uint32 kCount, uint32 kStages, uint32 kChunk>
__device__ __forceinline__ char (&first_stages(char (&stages)[kStages][kChunk]))[kCount][kChunk] {
  static_assert(kCount <= kStages);
  return reinterpret_cast<char(&)[kCount][kChunk]>(stages);
}
template <uint32 kCount, uint32 kStages, uint32 kChunk>
__device__ __forceinline__ char (&last_stages(char (&stages)[kStages][kChunk]))[kCount][kChunk] {
  static_assert(kCount <= kStages);
  return reinterpret_cast<char(&)[kCount][kChunk]>(stages[kStages - kCount]);
}

// Moves chunks 0 to count - 1 in order, at most kAhead loaded and not yet stored. load(i, stage, barrier) starts a
// load; store(i, stage) returns false to stop. If ready(i) is false it is asked again, while all loaded chunks are
// stored; waiting(i) returns true to give up. Every store must end in one commit. Returns false if it stopped early.
// Nothing is in flight when it returns.
template <uint32 kAhead, uint32 kStages, uint32 kChunk, class Ready, class Waiting, class Load, class Store>
__device__ __forceinline__ bool bulk_pump(BulkWarp& warp, char (&stages)[kStages][kChunk], uint64* full, uint32 count,
                                          Ready ready, Waiting waiting, Load load, Store store) {
  static_assert(kAhead > 0 && kAhead < kStages);
  uint32 loaded = 0, stored = 0;
  bool goes_on = true;
#pragma unroll 1
  while (stored < count && goes_on) {
    if (loaded < count && loaded < stored + kAhead) {
      if (ready(loaded)) {
        // All but the last stores have read their stages, and with them this one.
        if (warp.leads()) bulk_wait_read<kStages - kAhead>();
        __syncwarp();
        load(loaded, stages[loaded % kStages], &full[loaded % kStages]);
        loaded++;
        continue;
      }
      if (loaded == stored) {
        goes_on = !waiting(loaded);
        continue;
      }
    }
    const uint32 stage = stored % kStages;
    goes_on = warp.await(&full[stage], stored / kStages & 1) && store(stored, stages[stage]);
    if (goes_on) stored++;
  }
#pragma unroll 1
  for (; stored < loaded; stored++) {  // stopped early: wait for loads into the block's memory
    while (!barrier_passed(&full[stored % kStages], stored / kStages & 1)) {
    }
  }
  if (warp.leads()) bulk_wait_written<0>();
  __syncwarp();
  return goes_on;
}

#endif

}  // namespace ark::device
