// Moves the rows of a mixture of experts to their experts' blocks, on whichever rank, and back. moe_scatter stores rows
// whose places are known. moe_settle gives the user the rows that arrived in the staging place, followed by zeros.
// Places are described in csrc/ops/moe_routing.hpp.
//
// Memory order, reuse and progress: tiles.cuh. Blocks of moe_gather wait for peers in the middle of the kernel, so they
// are resident together. Input that the kernel reads must not be written while it runs.
#pragma once

#include "cuda/fused/embedding_bag.cuh"

namespace ark::device {

// moe_dispatch: every block counts all choices of this rank (a few thousand numbers, read from the second-level cache),
// and how many of each expert precede its own share of them. The first block sends the counts to all peers, and every
// block waits for theirs. So each block knows the places of its choices without communicating with other blocks, and
// stores the tokens' rows there. An expert's rows are sorted by rank, token and choice in every run.
//
// moe_gather brings rows back: the expert's rank stores each row in its slot on the token's rank. When all ranks have
// done so, a token's rows are added in the order of its choices in float32, and rounded once. Rows of the rank's own
// experts are read in place.

inline constexpr int kMoeThreads = 256;
inline constexpr uint32 kMostExperts = kMostCounts;
inline constexpr uint32 kMoeAhead = 4;  // accesses of a thread in flight together

struct MoeParams {
  TileLinks links;            // place: scatter and dispatch: the block of rows; gather: slots
  const void* from;           // rows to send; gather: the experts'
  const void* ids;            // dispatch: [choices]
  const float* weights;       // scatter, gather: per choice; null: 1
  int* places;                // [2, choices]: row, slot; written by dispatch
  int* rank_counts;           // [ranks, experts]; also written by dispatch
  long long* counts;          // dispatch: [experts of a rank], written
  void* out;                  // gather: the result
  const char* slots;          // gather: this rank's
  uint32 tokens, k, choices;  // of this rank; per token; of all tokens
  uint32 experts, local;      // of all ranks, of one
  uint32 max_rows;
  uint32 units, row_bytes;  // accesses per row
  bool each;                // scatter: one row per choice; gather: no sum
};

struct SettleParams {
  const void* from;  // null: rows are in place already
  void* out;
  const int* rank_counts;
  uint32 ranks, rank, experts, local;
  uint64 row_units, max_units;  // accesses per row; for all rows
};

#if defined(__CUDACC__)

template <class Format, bool kWide>
struct MoeAccess : BagAccess<Format, kWide> {
  using Base = BagAccess<Format, kWide>;
  using typename Base::Raw;

  // For data that another GPU stored while this kernel ran.
  static __device__ __forceinline__ Raw load_stored(const char* from) {
    Raw raw;
    if constexpr (kWide) {
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(raw.words[0]), "=r"(raw.words[1]), "=r"(raw.words[2]), "=r"(raw.words[3])
                   : "l"(from)
                   : "memory");
    } else if constexpr (Base::kBytes == 4) {
      asm volatile("ld.global.u32 %0, [%1];" : "=r"(raw.words[0]) : "l"(from) : "memory");
    } else {
      uint16 half;
      asm volatile("ld.global.u16 %0, [%1];" : "=h"(half) : "l"(from) : "memory");
      raw.words[0] = half;
    }
    return raw;
  }
};

// The number of pieces of a row.
__device__ __forceinline__ uint32 pieces_of(uint32 units) {
  return (units + 32 * kMoeAhead - 1) / (32 * kMoeAhead);
}

template <class Access>
__device__ __forceinline__ void move_piece(char* to, const char* from, uint32 piece, uint32 units) {
  const uint32 first = piece * 32 * kMoeAhead + threadIdx.x % 32;
  typename Access::Raw raw[kMoeAhead];
  ARK_UNROLL for (uint32 i = 0; i < kMoeAhead; ++i) if (first + i * 32 < units) raw[i] =
      Access::load(from + uint64{first + i * 32} * Access::kBytes);
  ARK_UNROLL for (uint32 i = 0; i < kMoeAhead; ++i) if (first + i * 32 < units)
      Access::copy(to + uint64{first + i * 32} * Access::kBytes, raw[i]);
}

template <class Access>
__device__ __forceinline__ void move_piece_weighted(char* to, const char* from, uint32 piece, uint32 units,
                                                    float weight) {
  const uint32 first = piece * 32 * kMoeAhead + threadIdx.x % 32;
  typename Access::Raw raw[kMoeAhead];
  ARK_UNROLL for (uint32 i = 0; i < kMoeAhead; ++i) if (first + i * 32 < units) raw[i] =
      Access::load(from + uint64{first + i * 32} * Access::kBytes);
  ARK_UNROLL for (uint32 i = 0; i < kMoeAhead; ++i) {
    if (first + i * 32 >= units) continue;
    float values[Access::kValues];
    Access::decode(raw[i], values);
    ARK_UNROLL for (int v = 0; v < Access::kValues; ++v) values[v] = multiply(values[v], weight);
    Access::store(to + uint64{first + i * 32} * Access::kBytes, values);
  }
}

// Called by one warp: prefix sums of `count` numbers that at(i) returns; set(i, sum) receives the sum before i. Returns
// the total.
template <class At, class Set>
__device__ __forceinline__ uint32 scan(uint32 count, At&& at, Set&& set) {
  const uint32 lane = threadIdx.x % 32;
  uint32 carry = 0;
  for (uint32 base = 0; base < count; base += 32) {
    const uint32 own = base + lane < count ? at(base + lane) : 0;
    uint32 sum = own;
    ARK_UNROLL for (uint32 step = 1; step < 32; step *= 2) {
      const uint32 below = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += below;
    }
    if (base + lane < count) set(base + lane, carry + sum - own);
    carry += __shfl_sync(~0u, sum, 31);
  }
  return carry;
}

// Finds where each peer wants its tiles. Returns false for the whole block to give up.
__device__ __forceinline__ bool find_places(TileExchange& exchange, char* (&places)[kMaxRanks], int ranks) {
  bool well = true;
  if (static_cast<int>(threadIdx.x) < ranks) {
    places[threadIdx.x] = exchange.place_of(static_cast<int>(threadIdx.x));
    well = places[threadIdx.x] != nullptr || exchange.is_local();  // a result without elements has no place
  }
  return __syncthreads_and(well) != 0;
}

template <class Format, class Index, bool kWide>
__device__ __forceinline__ void moe_dispatch(const MoeParams& p) {
  using Access = BagAccess<Format, kWide>;
  constexpr uint32 kWarps = kMoeThreads / 32, kRound = kMoeThreads;
  begin_kernel();
  TileExchange exchange(p.links);
  __shared__ uint32 mine[kMostExperts], before[kMostExperts];  // choices per expert: all, and those before this block's
  __shared__ uint32 rows[kMostExperts + 1];                    // per expert, from all ranks; then the start of its rows
  __shared__ uint32 lower[kMostExperts];                       // of these, from ranks before this one
  __shared__ uint32 slots[kMostExperts];                       // the start of this rank's choices for the expert
  __shared__ uint32 to_row[kRound], to_rank[kRound];
  __shared__ char* places[kMaxRanks];
  const uint32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const uint32 me = static_cast<uint32>(p.links.rank), ranks = static_cast<uint32>(p.links.ranks);
  const uint32 share = (p.choices + gridDim.x - 1) / gridDim.x;
  const uint32 begin = min(blockIdx.x * share, p.choices), end = min(begin + share, p.choices);
  const auto* const ids = static_cast<const Index*>(p.ids);

  for (uint32 e = thread; e < p.experts; e += kMoeThreads) mine[e] = before[e] = lower[e] = 0;
  __syncthreads();
  for (uint32 base = warp * 32; base < p.choices; base += kMoeThreads) {
    const uint32 i = base + lane;
    const long long id = i < p.choices ? static_cast<long long>(ids[i]) : -1;
    if (id < -1 || id >= static_cast<long long>(p.experts)) {
      report_tile(p.links.report, TileReport::expert, static_cast<int>(i), static_cast<int>(p.k), id, p.experts);
      asm volatile("trap;");
    }
    const uint32 alike = __match_any_sync(~0u, static_cast<int>(id));
    const uint32 early = __ballot_sync(~0u, i < begin) & alike;
    if (id < 0 || static_cast<int>(lane) != __ffs(static_cast<int>(alike)) - 1) continue;
    atomicAdd(&mine[id], __popc(alike));
    if (early != 0) atomicAdd(&before[id], __popc(early));
  }
  __syncthreads();
  if (blockIdx.x == 0) {
    for (uint32 i = thread; i < ranks * p.experts; i += kMoeThreads) {
      const uint32 peer = i / p.experts, e = i - peer * p.experts;
      if (peer != me) exchange.send_count(static_cast<int>(peer), e, mine[e]);
    }
  }
  for (uint32 e = thread; e < p.experts; e += kMoeThreads) rows[e] = mine[e];
  bool well = find_places(exchange, places, p.links.ranks);
  if (!well) return exchange.finish();
  for (uint32 i = thread; i < ranks * p.experts; i += kMoeThreads) {
    const uint32 peer = i / p.experts, e = i - peer * p.experts;
    uint32 count = mine[e];
    if (peer != me) {
      well = well && exchange.await_count(static_cast<int>(peer), e, count);
      if (!well) break;
      if (count != 0) {
        atomicAdd(&rows[e], count);
        if (peer < me) atomicAdd(&lower[e], count);
      }
    }
    if (blockIdx.x == 0) p.rank_counts[i] = static_cast<int>(count);
  }
  if (__syncthreads_and(well) == 0) return exchange.finish();
  if (blockIdx.x == 0)
    for (uint32 e = thread; e < p.local; e += kMoeThreads) p.counts[e] = rows[me * p.local + e];
  __syncthreads();
  if (warp == 0) {
    const uint32 all = scan(
        p.experts, [&](uint32 e) { return rows[e]; }, [&](uint32 e, uint32 sum) { rows[e] = sum; });
    if (lane == 0) rows[p.experts] = all;
  } else if (warp == 1) {
    scan(
        p.experts, [&](uint32 e) { return mine[e]; }, [&](uint32 e, uint32 sum) { slots[e] = sum; });
  }
  __syncthreads();
  if (thread < ranks) {
    const uint32 gets = rows[(thread + 1) * p.local] - rows[thread * p.local];
    if (gets > p.max_rows) {
      report_tile(p.links.report, TileReport::rows, 0, static_cast<int>(thread), gets, p.max_rows);
      asm volatile("trap;");
    }
  }
  __syncthreads();  // no row may be stored before this

  const uint32 pieces = pieces_of(p.units);
  for (uint32 round = begin; round < end; round += kRound) {
    const uint32 count = min(kRound, end - round);
    if (warp == 0) {
      for (uint32 base = 0; base < count; base += 32) {
        const uint32 i = round + base + lane;
        const int id = base + lane < count ? static_cast<int>(ids[i]) : -1;
        const uint32 alike = __match_any_sync(~0u, id);
        const uint32 number = id < 0 ? 0 : before[id] + __popc(alike & ((1u << lane) - 1));
        __syncwarp();
        if (id >= 0 && static_cast<int>(lane) == __ffs(static_cast<int>(alike)) - 1) before[id] += __popc(alike);
        __syncwarp();
        if (base + lane >= count) continue;
        const uint32 owner = id < 0 ? ranks : static_cast<uint32>(id) / p.local;
        const uint32 row = id < 0 ? 0 : rows[id] - rows[owner * p.local] + lower[id] + number;
        to_rank[base + lane] = owner, to_row[base + lane] = row;
        p.places[i] = id < 0 ? -1 : static_cast<int>(row);
        p.places[p.choices + i] = id < 0 ? -1 : static_cast<int>(slots[id] + number);
      }
    }
    __syncthreads();
    for (uint32 item = warp; item < count * pieces; item += kWarps) {
      const uint32 i = item / pieces;
      if (to_rank[i] == ranks) continue;
      move_piece<Access>(places[to_rank[i]] + uint64{to_row[i]} * p.row_bytes,
                         static_cast<const char*>(p.from) + uint64{(round + i) / p.k} * p.row_bytes, item - i * pieces,
                         p.units);
    }
    __syncthreads();
  }
  exchange.finish();
}

template <class Format, bool kWide>
__device__ __forceinline__ void moe_scatter(const MoeParams& p) {
  using Access = BagAccess<Format, kWide>;
  begin_kernel();
  TileExchange exchange(p.links);
  __shared__ uint32 first[kMaxRanks + 1];  // slot of each rank
  __shared__ char* places[kMaxRanks];
  const uint32 ranks = static_cast<uint32>(p.links.ranks), me = static_cast<uint32>(p.links.rank);
  if (threadIdx.x <= ranks) first[threadIdx.x] = 0;
  __syncthreads();
  for (uint32 e = threadIdx.x; e < p.experts; e += kMoeThreads) {
    const uint32 count = static_cast<uint32>(p.rank_counts[me * p.experts + e]);
    for (uint32 r = e / p.local + 1; r <= ranks; ++r) atomicAdd(&first[r], count);
  }
  if (!find_places(exchange, places, p.links.ranks)) return exchange.finish();
  const uint32 pieces = pieces_of(p.units), warps = gridDim.x * (kMoeThreads / 32);
  const uint64 items = uint64{p.choices} * pieces;
  for (uint64 item = blockIdx.x * (kMoeThreads / 32) + threadIdx.x / 32; item < items; item += warps) {
    const uint32 i = static_cast<uint32>(item / pieces), piece = static_cast<uint32>(item - uint64{i} * pieces);
    const int row = p.places[i], slot = p.places[p.choices + i];
    if (slot < 0 || static_cast<uint32>(row) >= p.max_rows || static_cast<uint32>(slot) >= first[ranks]) continue;
    uint32 owner = 0;
    while (static_cast<uint32>(slot) >= first[owner + 1]) ++owner;
    char* const to = places[owner] + uint64{static_cast<uint32>(row)} * p.row_bytes;
    const char* const from = static_cast<const char*>(p.from) + uint64{p.each ? i : i / p.k} * p.row_bytes;
    if (p.weights == nullptr)
      move_piece<Access>(to, from, piece, p.units);
    else
      move_piece_weighted<Access>(to, from, piece, p.units, p.weights[i]);
  }
  exchange.finish();
}

template <class Format, bool kWide>
__device__ __forceinline__ void moe_gather(const MoeParams& p) {
  using Access = MoeAccess<Format, kWide>;
  constexpr int kValues = Access::kValues;
  begin_kernel();
  TileExchange exchange(p.links);
  __shared__ uint32 first_row[kMostExperts + 1];  // per expert and rank, in this order
  __shared__ uint32 first_slot[kMostExperts];     // of the same, on that rank
  __shared__ uint32 own_slots[2];                 // start and end of this rank's choices for its own experts
  __shared__ char* places[kMaxRanks];
  const uint32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32 ranks = static_cast<uint32>(p.links.ranks), me = static_cast<uint32>(p.links.rank);
  const uint32 own = me * p.local;
  if (warp < ranks) {
    const int* const counts = p.rank_counts + warp * p.experts;
    const uint32 all = scan(
        p.experts, [&](uint32 e) { return static_cast<uint32>(counts[e]); },
        [&](uint32 e, uint32 sum) {
          if (e >= own && e < own + p.local) first_slot[(e - own) * ranks + warp] = sum;
          if (warp == me && e == own) own_slots[0] = sum;
          if (warp == me && e == own + p.local) own_slots[1] = sum;
        });
    if (warp == me && me + 1 == ranks && lane == 0) own_slots[1] = all;
  }
  __syncthreads();
  if (warp == 0) {
    const uint32 all = scan(
        p.experts,
        [&](uint32 s) { return static_cast<uint32>(p.rank_counts[s % ranks * p.experts + own + s / ranks]); },
        [&](uint32 s, uint32 sum) { first_row[s] = sum; });
    if (lane == 0) first_row[p.experts] = all;
  }
  const bool found = find_places(exchange, places, p.links.ranks);

  const uint32 pieces = pieces_of(p.units), warps = gridDim.x * (kMoeThreads / 32);
  const uint32 from_warp = blockIdx.x * (kMoeThreads / 32) + warp;
  if (found && ranks > 1) {
    const uint64 items = uint64{min(first_row[p.experts], p.max_rows)} * pieces;
    for (uint64 item = from_warp; item < items; item += warps) {
      const uint32 row = static_cast<uint32>(item / pieces), piece = static_cast<uint32>(item - uint64{row} * pieces);
      uint32 low = 0, high = p.experts;  // binary search for the last that starts at or before the row
      while (high - low > 1) {
        const uint32 middle = (low + high) / 2;
        if (first_row[middle] <= row)
          low = middle;
        else
          high = middle;
      }
      const uint32 to = low % ranks;
      if (to == me) continue;
      move_piece<Access>(places[to] + uint64{first_slot[low] + row - first_row[low]} * p.row_bytes,
                         static_cast<const char*>(p.from) + uint64{row} * p.row_bytes, piece, p.units);
    }
  }
  if (!exchange.meet() || !found) return;

  const uint32 steps = (p.units + 31) / 32, k = p.each ? 1 : p.k;
  const uint64 sums = uint64{p.each ? p.choices : p.tokens} * steps;
  for (uint64 item = from_warp; item < sums; item += warps) {
    const uint32 at = static_cast<uint32>(item / steps);
    const uint32 unit = static_cast<uint32>(item - uint64{at} * steps) * 32 + lane;
    if (unit >= p.units) continue;
    const uint64 column = uint64{unit} * Access::kBytes;
    float total[kValues];
    ARK_UNROLL for (int v = 0; v < kValues; ++v) total[v] = 0.0f;
    constexpr uint32 kAhead = 4;
    for (uint32 base = 0; base < k; base += kAhead) {
      typename Access::Raw raw[kAhead];
      bool comes[kAhead];
      ARK_UNROLL for (uint32 j = 0; j < kAhead; ++j) {
        comes[j] = false;
        if (base + j >= k) continue;
        const uint32 i = at * k + base + j;
        const int row = p.places[i], slot = p.places[p.choices + i];
        if (slot < 0) continue;
        const bool here = static_cast<uint32>(slot) >= own_slots[0] && static_cast<uint32>(slot) < own_slots[1];
        if (here && static_cast<uint32>(row) >= p.max_rows) continue;
        comes[j] = true;
        raw[j] = here ? Access::load(static_cast<const char*>(p.from) + uint64{static_cast<uint32>(row)} * p.row_bytes +
                                     column)
                      : Access::load_stored(p.slots + uint64{static_cast<uint32>(slot)} * p.row_bytes + column);
      }
      ARK_UNROLL for (uint32 j = 0; j < kAhead; ++j) {
        if (!comes[j]) continue;
        float values[kValues];
        Access::decode(raw[j], values);
        const float weight = p.weights == nullptr ? 1.0f : p.weights[at * k + base + j];
        ARK_UNROLL for (int v = 0; v < kValues; ++v) total[v] =
            add(total[v], p.weights == nullptr ? values[v] : multiply(values[v], weight));
      }
    }
    Access::store(static_cast<char*>(p.out) + uint64{at} * p.row_bytes + column, total);
  }
}

template <class Format, bool kWide>
__device__ __forceinline__ void moe_settle(const SettleParams& p) {
  using Access = BagAccess<Format, kWide>;
  begin_kernel();
  __shared__ uint32 used;
  if (threadIdx.x == 0) used = 0;
  __syncthreads();
  for (uint32 i = threadIdx.x; i < p.ranks * p.local; i += kMoeThreads)
    atomicAdd(&used, static_cast<uint32>(p.rank_counts[i / p.local * p.experts + p.rank * p.local + i % p.local]));
  __syncthreads();
  const uint64 full = min(used * p.row_units, p.max_units);
  const uint64 threads = uint64{gridDim.x} * kMoeThreads, first = uint64{blockIdx.x} * kMoeThreads + threadIdx.x;
  const typename Access::Raw zero{};
  for (uint64 i = p.from == nullptr ? full + first : first; i < p.max_units; i += threads)
    Access::copy(static_cast<char*>(p.out) + i * Access::kBytes,
                 i < full ? Access::load(static_cast<const char*>(p.from) + i * Access::kBytes) : zero);
}

#endif

}  // namespace ark::device
