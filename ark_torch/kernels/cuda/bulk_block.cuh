// What the warps of a block share that moves large messages (bulk.cuh): parameters, rings, bounded waits, and copies
// between global and shared memory that the bulk copy engine cannot make because of their alignment.
#pragma once

#include "cuda/bulk_copy.cuh"

namespace ark::device {

inline constexpr int kBulkDepth = 8;        // slots of a ring
inline constexpr uint32 kBulkMovers = 160;  // threads: four warps that move, one that signals; then
inline constexpr uint32 kBulkAdders = 256;  // eight that add
inline constexpr int kPushStages = 8, kTakeStages = 6, kMostAddStages = 4, kResultStages = 4;

ARK_HOST_DEVICE constexpr uint32 bulk_chunk(int ranks) {
  return ranks <= 4 ? 8192 : 4096;
}
ARK_HOST_DEVICE constexpr int bulk_add_stages(int ranks) {
  return ranks <= 2 ? kMostAddStages : 2;
}
ARK_HOST_DEVICE constexpr uint32 bulk_shared_bytes(int ranks, bool reduces) {
  return bulk_chunk(ranks) *
         (kPushStages + kTakeStages + (reduces ? bulk_add_stages(ranks) * ranks + kResultStages : 0));
}

// A block's own counters towards and from one peer, in one set.
struct alignas(16) BulkState {
  uint64 sent, received;
};

struct BulkParams {
  char* arena[kMaxRanks];  // rank r's symmetric memory as mapped here
  uint64 slots_at;         // [2][source][block][kBulkDepth] chunks, written by the source
  uint64 arrived_at;       // [2][source][block] words: chunks that the source has put there
  uint64 credits_at;       // [2][peer][block] words: chunks of this rank's that the peer has taken
  uint64 state_at;         // [2][peer][block] BulkState, the owner's alone
  GroupStatus* status;
  uint64 limit_ns;
  const void* push[kMaxRanks];  // to each peer
  uint64 push_bytes[kMaxRanks];
  void* take[kMaxRanks];  // from each peer, in the set of results
  uint64 take_bytes[kMaxRanks];
  const void* in;  // reductions: this rank's contribution to its own part, and where the result goes (may be null)
  void* out;
  uint64 bytes;
  uint32 receivers;  // bit r: rank r is sent the result
  uint32 average;
  DType dtype;  // for GenericRule
  ReduceOp op;
  uint16 most_blocks;  // of the layout
  int rank, ranks;
};

#if defined(__CUDACC__)

struct BulkBarriers {
  uint64 push[kPushStages], take[kTakeStages];
  uint64 full[kMostAddStages], empty[kMostAddStages];  // contributions to add
  uint64 made[kResultStages], stored[kResultStages];   // results
  uint64 written[2][kMaxRanks];  // by set and peer: chunks in the peer's slots, for the signalling warp
  uint32 senders;                // that have not finished
  uint32 left;                   // a warp has given up
};

// Copies by a whole warp, in the widest pieces that the address in global memory allows.
template <class T>
__device__ __forceinline__ void warp_copy_as(void* to, const void* from, uint32 bytes) {
  const uint32 count = bytes / sizeof(T), lane = threadIdx.x & 31;
#pragma unroll 8
  for (uint32 i = lane; i < count; i += 32) static_cast<T*>(to)[i] = static_cast<const T*>(from)[i];
  const uint32 done = count * sizeof(T);
  if (done + lane < bytes) static_cast<uint8*>(to)[done + lane] = static_cast<const uint8*>(from)[done + lane];
}
__device__ __noinline__ void warp_copy(void* to, const void* from, uint32 bytes) {
  const uint64 places = reinterpret_cast<uint64>(to) | reinterpret_cast<uint64>(from);
  if ((places & 7) == 0)
    warp_copy_as<uint64>(to, from, bytes);
  else if ((places & 3) == 0)
    warp_copy_as<uint32>(to, from, bytes);
  else if ((places & 1) == 0)
    warp_copy_as<uint16>(to, from, bytes);
  else
    warp_copy_as<uint8>(to, from, bytes);
  __syncwarp();
}

// Functions are called by whole warps unless they say otherwise; lane 0, the leader, talks to the engine and to peers.
template <int kRanks>
class BulkBlock {
 public:
  static constexpr uint32 kChunk = bulk_chunk(kRanks);
  enum Set { contributions, results };

  const BulkParams& p;
  BulkBarriers* const barriers;
  char* const stages;
  const bool leader = (threadIdx.x & 31) == 0;

  __device__ __forceinline__ BulkBlock(const BulkParams& params, BulkBarriers* shared, char* memory)
      : p(params), barriers(shared), stages(memory), patience_{params.status, params.limit_ns} {}

  static __device__ __forceinline__ uint32 padded(uint32 bytes) { return (bytes + 15) & ~15u; }
  static __device__ __forceinline__ bool direct(const void* global, uint32 bytes) {
    return ((reinterpret_cast<uint64>(global) | bytes) & 15) == 0;
  }

  template <class T>
  __device__ __forceinline__ T* word(int owner, uint64 table, int set, int other) const {
    return reinterpret_cast<T*>(p.arena[owner] + table) + (set * kRanks + other) * p.most_blocks + blockIdx.x;
  }
  __device__ __forceinline__ BulkState* state(int set, int peer) const {
    return word<BulkState>(p.rank, p.state_at, set, peer);
  }
  __device__ __forceinline__ char* slot(int owner, int set, int source, uint64 count) const {
    const uint64 ring = (static_cast<uint64>(set) * kRanks + source) * p.most_blocks + blockIdx.x;
    return p.arena[owner] + p.slots_at + (ring * kBulkDepth + count % kBulkDepth) * kChunk;
  }

  // The leader's: `count` chunks are in the peer's slots.
  __device__ __forceinline__ void note_written(int peer, int set, uint64 count) const {
    asm volatile("st.release.cta.shared.u64 [%0], %1;" ::"r"(shared_address(&barriers->written[set][peer])), "l"(count)
                 : "memory");
  }
  __device__ __forceinline__ uint64 load_written(int peer, int set) const {
    uint64 count;
    asm volatile("ld.acquire.cta.shared.u64 %0, [%1];"
                 : "=l"(count)
                 : "r"(shared_address(&barriers->written[set][peer]))
                 : "memory");
    return count;
  }
  // The leader's, when it has noted its last chunk.
  __device__ __forceinline__ void finish_sending() const {
    __threadfence_block();
    atomicSub(&barriers->senders, 1u);
  }
  // One thread's: `count` of the peer's chunks are taken.
  __device__ __forceinline__ void tell_taken(int peer, int set, uint64 count) const {
    store_word(word<uint64>(peer, p.credits_at, set, p.rank), count);
  }
  static __device__ __forceinline__ void store_word(uint64* to, uint64 count) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(count) : "memory");
  }
  static __device__ __forceinline__ uint64 load_word(const uint64* from) {
    uint64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
  }
  // Between a count that was read and the engine's reads behind it.
  static __device__ __forceinline__ void acquire_slots() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    fence_async_global();
  }

  // Whether the block is to leave. `peer`: whom the caller waits for, -1: a warp of this block.
  __device__ __forceinline__ bool leaves(int peer, uint64 count) {
    bool leave = false;
    if (leader) {
      auto* left = const_cast<volatile uint32*>(&barriers->left);
      leave = *left != 0 || (peer >= 0 && patience_.over(peer, count));
      if (leave) *left = 1;
    }
    return __shfl_sync(~0u, leave, 0);
  }
  __device__ __forceinline__ bool passed(uint64* barrier, uint32 parity) const {
    return __all_sync(~0u, barrier_passed(barrier, parity));
  }
  __device__ __forceinline__ bool await_barrier(uint64* barrier, uint32 parity) {
    while (!passed(barrier, parity))
      if (leaves(-1, 0)) return false;
    return true;
  }
  // Until the word, of which `known` was seen, is at least `least`.
  __device__ __forceinline__ bool await_word(const uint64* from, uint64& known, uint64 least, int peer) {
    while (known < least) {
      known = __shfl_sync(~0u, leader ? load_word(from) : 0, 0);
      if (known < least && leaves(peer, least)) return false;
    }
    return true;
  }
  // Until the peer has room for this rank's chunk `number`.
  __device__ __forceinline__ bool await_room(int set, int peer, uint64 number, uint64& known) {
    return number < kBulkDepth ||
           await_word(word<uint64>(p.rank, p.credits_at, set, peer), known, number - kBulkDepth + 1, peer);
  }
  // Copies into shared memory that were begun must come in before the block may end. They read this GPU's own memory
  // and wait for nobody, so the hardware bounds this.
  __device__ __forceinline__ void drain(uint64* ring, int stages_of_ring, uint32 from, uint32 to) const {
    for (uint32 i = from; i < to; i++)
      while (!passed(&ring[i % stages_of_ring], i / stages_of_ring & 1))
        ;
  }

  // Fills a stage from a user's buffer and arrives at its barrier, which also waits for `more` bytes of the caller's.
  __device__ __forceinline__ void load(char* stage, const void* from, uint32 bytes, uint64* barrier, uint32 more = 0) {
    if (direct(from, bytes)) {
      if (leader) {
        barrier_expect(barrier, bytes + more);
        bulk_load(stage, from, bytes, barrier);
      }
    } else {
      warp_copy(stage, from, bytes);
      fence_async_shared();
      __syncwarp();
      if (leader) barrier_expect(barrier, more);
    }
    __syncwarp();
  }
  // Writes a stage to a user's buffer; the leader commits what it starts.
  __device__ __forceinline__ void store(void* to, const char* stage, uint32 bytes) {
    if (!direct(to, bytes)) return warp_copy(to, stage, bytes);
    if (leader) bulk_store(to, stage, bytes);
  }

 private:
  Patience patience_;
};

// The chunks of this block in the messages to or from all peers: chunk blockIdx of each, then blockIdx + gridDim, ...
template <int kRanks>
struct BulkItems {
  const uint64* bytes;   // by peer
  const int rank, step;  // peers in the order rank + step, rank + 2 step, ...
  uint64 chunk = blockIdx.x;
  int d = 0;
  bool over = false;

  __device__ __forceinline__ BulkItems(const uint64* sizes, int own, int direction)
      : bytes(sizes), rank(own), step(direction) {
    next();
  }
  __device__ __forceinline__ int peer() const {
    const int sum = rank + step * d;
    return sum < 0 ? sum + kRanks : sum >= kRanks ? sum - kRanks : sum;
  }
  __device__ __forceinline__ uint64 at() const { return chunk * bulk_chunk(kRanks); }
  __device__ __forceinline__ uint32 size() const {
    const uint64 left = bytes[peer()] - at();
    return left < bulk_chunk(kRanks) ? static_cast<uint32>(left) : bulk_chunk(kRanks);
  }
  __device__ __forceinline__ void next() {
    bool any = d != 0;
    for (;;) {
      if (++d < kRanks) {
        if (at() < bytes[peer()]) return;
        continue;
      }
      over = !any;
      if (over) return;
      any = false;
      d = 0;
      chunk += gridDim.x;
      // A row in which nobody has a chunk is the end.
      for (int peer = 0; peer < kRanks; peer++) any = any || (peer != rank && at() < bytes[peer]);
    }
  }
};

// Counters by rank in registers, indexed by a rank known at run time.
template <int kRanks>
struct RankCounters {
  uint64 values[kRanks];

  __device__ __forceinline__ uint64 of(int which) const {
    uint64 value = 0;
    ARK_UNROLL
    for (int r = 0; r < kRanks; r++) value = r == which ? values[r] : value;
    return value;
  }
  __device__ __forceinline__ void set(int which, uint64 value) {
    ARK_UNROLL
    for (int r = 0; r < kRanks; r++) values[r] = r == which ? value : values[r];
  }
  __device__ __forceinline__ uint64 bump(int which) {
    const uint64 value = of(which) + 1;
    set(which, value);
    return value;
  }
};

#endif

}  // namespace ark::device
