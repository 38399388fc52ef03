// The rows of a mixture of experts in one kernel (moe_layer.cuh): where they go, how tokens are sent to their experts'
// ranks, and how rows that have come back are added. Places are described in csrc/ops/moe_routing.hpp.
#pragma once

#include "cuda/fused/moe_rows.cuh"
#include "cuda/fused/moe_tasks.cuh"

namespace ark::device {

// A block sends and adds the tokens of its own share. A token's row is loaded once and stored in every expert's rows. A
// piece of a row is counted where it has been stored, per source and group of rows, so that a tile waits only for the
// rows that it reads. Rows come back tile by tile and are counted per slot.

inline constexpr uint32 kMostLayerExperts = 256;  // of all ranks; their tables are in shared memory

// What a profiled launch tells of each block: two numbers each, cycles and how often (benchmarks/moe_profile.py).
enum class MoeStamp : uint32 {
  whole,
  prepared,
  sent,
  multiplied,
  added,  // of a warp that multiplies
  task_wait,
  loads_wait,
  left_wait,
  firsts,
  seconds,  // of the same, while it multiplies
  bring_rows,
  bring_stage,
  storing,
  telling,  // of the warps that load and store
};
inline constexpr uint32 kMoeStamps = 14;

struct MoeLayerParams {
  TensorMap rows, w1, inner, w2;  // rows and inner in boxes of 16 rows, weights in boxes of a tile's columns
  TileLinks links;                // to the place of the experts' rows, which slots follow
  uint64 slots;                   // their offset
  const void* x;
  const void* ids;       // [tokens, k]
  const float* weights;  // [tokens, k]
  int* places;           // [2, tokens, k]: row, slot; for this kernel alone
  char* hidden;          // [max_rows, ffn]: the result of the first product
  void* out;             // [tokens, dim]
  uint32 tokens, k;      // of this rank
  uint32 experts, local, max_rows;
  uint32 dim, ffn;
  uint32 lines;     // of w1, per expert
  uint32 tiles[2];  // of columns, of each product
  bool narrow_ids;
  long long* stamps;  // [blocks, kMoeStamps, 2], if profiled

  ARK_HOST_DEVICE uint32 row_bytes() const { return dim * 2; }
  ARK_HOST_DEVICE uint32 units() const { return dim / 8; }
};

#if defined(__CUDACC__)

// Of a block, in shared memory.
struct MoeTables {
  uint32 starts[kMostLayerExperts + 1];  // first row of each expert, counted over all ranks' experts
  // Per expert of this rank and source: where the source's rows start in the expert's, and where their slots do there.
  uint32 first_row[kMostLayerExperts], first_slot[kMostLayerExperts];
  char* places[kMaxRanks];
};

// Only until the tables are made.
struct MoeScratch {
  uint32 counts[kMaxRanks * kMostLayerExperts];  // choices of each rank for each expert
  uint32 before[kMostLayerExperts];              // of this rank, before this block's share
  uint32 lower[kMostLayerExperts];               // of lower ranks
  uint32 slots[kMostLayerExperts];               // the start of this rank's choices for the expert
};

template <class Format, uint32 kRows, uint32 kThreads>
struct MoeLayerRows {
  static constexpr uint32 kWarps = kThreads / 32;
  using Access = MoeAccess<Format, true>;

  const MoeLayerParams& p;
  TileExchange& exchange;
  MoeTables& tables;

  static __device__ __forceinline__ uint32 lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ uint32 warp() { return threadIdx.x / 32; }
  __device__ __forceinline__ uint32 me() const { return static_cast<uint32>(p.links.rank); }
  __device__ __forceinline__ uint32 ranks() const { return static_cast<uint32>(p.links.ranks); }
  __device__ __forceinline__ uint32 share() const { return (p.tokens + gridDim.x - 1) / gridDim.x; }
  __device__ __forceinline__ uint32 begin() const { return min(blockIdx.x * share(), p.tokens); }
  __device__ __forceinline__ uint32 end() const { return min(begin() + share(), p.tokens); }
  __device__ __forceinline__ TileControl* control(uint32 rank) const { return p.links.control[rank]; }
  __device__ __forceinline__ long long id_at(uint32 choice) const {
    return p.narrow_ids ? static_cast<const int*>(p.ids)[choice] : static_cast<const long long*>(p.ids)[choice];
  }
  // First row of an expert on its rank.
  __device__ __forceinline__ uint32 start_of(uint32 expert) const {
    return tables.starts[expert] - tables.starts[expert / p.local * p.local];
  }

  // Called by every thread. Counts choices, tells the peers, and makes the tables. False for the whole block: give up.
  __device__ __forceinline__ bool prepare(MoeScratch& scratch) {
    const uint32 choices = p.tokens * p.k, first = begin() * p.k;
    uint32* const mine = scratch.counts + me() * p.experts;
    for (uint32 e = threadIdx.x; e < p.experts; e += kThreads) mine[e] = scratch.before[e] = 0;
    __syncthreads();
    constexpr uint32 kAhead = 4;  // loads in flight
    ARK_ROLLED for (uint32 base = warp() * 32; base < choices; base += kThreads * kAhead) {
      long long ids[kAhead];
      ARK_UNROLL for (uint32 a = 0; a < kAhead; ++a) {
        const uint32 i = base + a * kThreads + lane();
        ids[a] = i < choices ? id_at(i) : -1;
      }
      ARK_UNROLL for (uint32 a = 0; a < kAhead; ++a) count(scratch, mine, base + a * kThreads + lane(), ids[a], first);
    }
    __syncthreads();
    if (blockIdx.x == 0) {
      for (uint32 i = threadIdx.x; i < ranks() * p.experts; i += kThreads) {
        const uint32 peer = i / p.experts, e = i - peer * p.experts;
        if (peer != me()) exchange.send_count(static_cast<int>(peer), e, mine[e]);
      }
    }
    if (!find_places(exchange, tables.places, p.links.ranks)) return false;
    bool well = true;
    for (uint32 i = threadIdx.x; well && i < ranks() * p.experts; i += kThreads) {
      const uint32 peer = i / p.experts;
      if (peer != me()) well = exchange.await_count(static_cast<int>(peer), i - peer * p.experts, scratch.counts[i]);
    }
    if (__syncthreads_and(well) == 0) return false;
    scan_counts(scratch);
    __syncthreads();
    if (threadIdx.x < ranks()) {
      const uint32 gets = tables.starts[(threadIdx.x + 1) * p.local] - tables.starts[threadIdx.x * p.local];
      if (gets > p.max_rows) {
        report_tile(p.links.report, TileReport::rows, 0, static_cast<int>(threadIdx.x), gets, p.max_rows);
        asm volatile("trap;");
      }
    }
    __syncthreads();  // no row may be stored before this
    if (warp() == 0) place(scratch);
    __syncthreads();
    return true;
  }

  // Called by a whole warp: counts a choice of each lane.
  __device__ __forceinline__ void count(MoeScratch& scratch, uint32* mine, uint32 choice, long long id,
                                        uint32 first) const {
    if (id < -1 || id >= static_cast<long long>(p.experts)) {
      report_tile(p.links.report, TileReport::expert, static_cast<int>(choice), static_cast<int>(p.k), id, p.experts);
      asm volatile("trap;");
    }
    const uint32 alike = __match_any_sync(~0u, static_cast<int>(id));
    const uint32 early = __ballot_sync(~0u, choice < first) & alike;
    if (id >= 0 && static_cast<int>(lane()) == __ffs(static_cast<int>(alike)) - 1) {
      atomicAdd(&mine[id], __popc(alike));
      if (early != 0) atomicAdd(&scratch.before[id], __popc(early));
    }
    __syncwarp();
  }

  __device__ __forceinline__ void scan_counts(MoeScratch& scratch) {
    const uint32 own = me() * p.local;
    const auto sum_below = [&](uint32 e, uint32 below) {
      uint32 sum = 0;
      for (uint32 r = 0; r < below; ++r) sum += scratch.counts[r * p.experts + e];
      return sum;
    };
    for (uint32 e = threadIdx.x; e < p.experts; e += kThreads) scratch.lower[e] = sum_below(e, me());
    for (uint32 i = threadIdx.x; i < p.local * ranks(); i += kThreads)
      tables.first_row[i] = sum_below(own + i / ranks(), i % ranks());
    if (warp() == 0) {
      const uint32 all = scan(
          p.experts, [&](uint32 e) { return sum_below(e, ranks()); },
          [&](uint32 e, uint32 sum) { tables.starts[e] = sum; });
      if (lane() == 0) tables.starts[p.experts] = all;
      return;
    }
    for (uint32 r = warp() - 1; r < ranks(); r += kWarps - 1)
      scan(
          p.experts, [&](uint32 e) { return scratch.counts[r * p.experts + e]; },
          [&](uint32 e, uint32 sum) {
            if (r == me()) scratch.slots[e] = sum;
            if (e >= own && e < own + p.local) tables.first_slot[(e - own) * ranks() + r] = sum;
          });
  }

  // Called by one warp: the places of this block's choices.
  __device__ __forceinline__ void place(MoeScratch& scratch) {
    const uint32 last = end() * p.k, choices = p.tokens * p.k;
    for (uint32 base = begin() * p.k; base < last; base += 32) {
      const uint32 i = base + lane();
      const int id = i < last ? static_cast<int>(id_at(i)) : -1;
      const uint32 alike = __match_any_sync(~0u, id);
      const uint32 number = id < 0 ? 0 : scratch.before[id] + __popc(alike & ((1u << lane()) - 1));
      __syncwarp();
      if (id >= 0 && static_cast<int>(lane()) == __ffs(static_cast<int>(alike)) - 1)
        scratch.before[id] += __popc(alike);
      __syncwarp();
      if (i >= last) continue;
      const uint32 expert = static_cast<uint32>(id);
      p.places[i] = id < 0 ? -1 : static_cast<int>(start_of(expert) + scratch.lower[id] + number);
      p.places[choices + i] = id < 0 ? -1 : static_cast<int>(scratch.slots[id] + number);
    }
  }

  // The work of several warps, by number: sends the rows of this block's tokens.
  __device__ __forceinline__ void send(uint32 sender, uint32 senders) {
    const uint32 pieces = pieces_of(p.units()), items = (end() - begin()) * pieces;
    ARK_ROLLED for (uint32 item = sender; item < items; item += senders) {
      const uint32 token = begin() + item / pieces, piece = item % pieces;
      const uint32 first = piece * 32 * kMoeAhead + lane(), choice = token * p.k;
      const char* const from = static_cast<const char*>(p.x) + uint64{token} * p.row_bytes();
      typename Access::Raw raw[kMoeAhead];
      ARK_UNROLL for (uint32 i = 0; i < kMoeAhead; ++i) if (first + i * 32 < p.units()) raw[i] =
          Access::load(from + uint64{first + i * 32} * Access::kBytes);
      ARK_ROLLED for (uint32 j = 0; j < p.k; ++j) {
        const int row = p.places[choice + j];
        if (row < 0) continue;
        char* const to = tables.places[static_cast<uint32>(id_at(choice + j)) / p.local] +
                         uint64{static_cast<uint32>(row)} * p.row_bytes();
        ARK_UNROLL for (uint32 i = 0; i < kMoeAhead; ++i) if (first + i * 32 < p.units())
            Access::copy(to + uint64{first + i * 32} * Access::kBytes, raw[i]);
      }
      __syncwarp();
      for (uint32 j = lane(); j < p.k; j += 32) {
        const int row = p.places[choice + j];
        if (row < 0) continue;
        const uint32 expert = static_cast<uint32>(id_at(choice + j)), owner = expert / p.local;
        const uint32 start = start_of(expert);
        const uint32 group = group_of(start, expert - owner * p.local, static_cast<uint32>(row) - start, kRows);
        TileExchange::add(&control(owner)->group_rows[me()][group]);
      }
      __syncwarp();
    }
  }

  // Lane r: how many pieces of the task's rows come from rank r.
  __device__ __forceinline__ uint32 pieces_from(const MoeTask& task, uint32 expert_rows) const {
    if (lane() >= ranks()) return 0;
    const uint32 i = task.expert * ranks() + lane();
    const uint32 from = max(tables.first_row[i], task.down);
    const uint32 to = min(lane() + 1 < ranks() ? tables.first_row[i + 1] : expert_rows, task.down + task.rows);
    return to > from ? (to - from) * pieces_of(p.units()) : 0;
  }

  // Where a row of one of this rank's experts comes from, and its slot there.
  __device__ __forceinline__ uint32 slot_of(uint32 expert, uint32 row, uint32& source) const {
    const uint32 first = expert * ranks();
    source = 0;
    while (source + 1 < ranks() && tables.first_row[first + source + 1] <= row) ++source;
    return tables.first_slot[first + source] + row - tables.first_row[first + source];
  }

  // The work of warps that have no other: adds the rows of this block's tokens in the order of their choices. `taken`
  // counts parts of tokens, in shared memory.
  __device__ __forceinline__ void add_rows(uint32& taken) {
    constexpr uint32 kPause = 100, kPart = 64;  // accesses: two for each thread
    const uint32 choices = p.tokens * p.k, parts = (p.units() + kPart - 1) / kPart, items = (end() - begin()) * parts;
    const char* const slots = tables.places[me()] + p.slots;
    for (;;) {
      uint32 item = 0;
      if (lane() == 0) item = atomicAdd(&taken, 1u);
      item = __shfl_sync(~0u, item, 0);
      if (item >= items) return;
      const uint32 token = begin() + item / parts, choice = token * p.k;
      bool well = true;
      for (uint32 j = lane(); well && j < p.k; j += 32) {
        const int slot = p.places[choices + choice + j];
        if (slot < 0) continue;
        const int owner = static_cast<int>(static_cast<uint32>(id_at(choice + j)) / p.local);
        well = exchange.await_sum(&control(me())->slot_tiles[slot], p.tiles[1], owner, kPause);
      }
      if (__all_sync(~0u, well) == 0) return;
      add_part(choice, slots, item % parts * kPart + lane(), static_cast<char*>(p.out) + uint64{token} * p.row_bytes());
    }
  }

  // Adds accesses `unit` and `unit` + 32 of a token's row.
  __device__ __forceinline__ void add_part(uint32 choice, const char* slots, uint32 unit, char* out) const {
    constexpr uint32 kAhead = 2;
    float total[2][Access::kValues];
    ARK_UNROLL for (int u = 0; u < 2; ++u) ARK_UNROLL for (int v = 0; v < Access::kValues; ++v) total[u][v] = 0.0f;
    ARK_ROLLED for (uint32 base = 0; base < p.k; base += kAhead) {
      typename Access::Raw raw[kAhead][2];
      int slot[kAhead];
      ARK_UNROLL for (uint32 j = 0; j < kAhead; ++j) {
        slot[j] = base + j < p.k ? p.places[p.tokens * p.k + choice + base + j] : -1;
        if (slot[j] < 0) continue;
        const char* const from = slots + uint64{static_cast<uint32>(slot[j])} * p.row_bytes();
        ARK_UNROLL for (uint32 u = 0; u < 2; ++u) if (unit + u * 32 < p.units()) raw[j][u] =
            Access::load_stored(from + uint64{unit + u * 32} * Access::kBytes);
      }
      ARK_UNROLL for (uint32 j = 0; j < kAhead; ++j) {
        if (slot[j] < 0) continue;
        const float weight = p.weights[choice + base + j];
        ARK_UNROLL for (int u = 0; u < 2; ++u) {
          float values[Access::kValues];
          Access::decode(raw[j][u], values);
          ARK_UNROLL for (int v = 0; v < Access::kValues; ++v) total[u][v] =
              add(total[u][v], multiply(values[v], weight));
        }
      }
    }
    ARK_UNROLL for (uint32 u = 0; u < 2; ++u) if (unit + u * 32 < p.units())
        Access::store(out + uint64{unit + u * 32} * Access::kBytes, total[u]);
  }

  // The work of the last block: sums for the next launch.
  __device__ __forceinline__ void clear() {
    TileControl* const own = control(me());
    const uint32 rows = tables.starts[(me() + 1) * p.local] - tables.starts[me() * p.local];
    const uint32 groups = rows / kRows + p.local, choices = p.tokens * p.k;
    for (uint32 i = threadIdx.x; i < groups; i += kThreads) own->group_tiles[i] = 0;
    for (uint32 r = 0; r < ranks(); ++r)
      for (uint32 i = threadIdx.x; i < groups; i += kThreads) own->group_rows[r][i] = 0;
    for (uint32 i = threadIdx.x; i < choices; i += kThreads) own->slot_tiles[i] = 0;
    if (threadIdx.x == 0) own->tasks = 0;
  }
};

#endif

}  // namespace ark::device
