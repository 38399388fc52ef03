// Embedding bags whose results are stored where the all-to-all would deliver them: on the rank that has the sample.
//
// A group of kLanes threads has one bag, or 16 * kLanes bytes of its columns. Each thread loads one index; the group
// then reads row after row, 16 bytes per thread with kAhead rows in flight, and adds them in float32 in index order,
// rounding once. Short rows share a warp, whose bags are of consecutive samples of one rank.
#pragma once

#include "cuda/fused/tiles.cuh"

namespace ark::device {

// All branches are uniform within a warp: if its halves diverged (one storing here, one on the peer), they would never
// reconverge, which is much slower. Tables are processed one after the other, so that rows that several bags name hit
// the second-level cache. Adjacent warps have samples of different ranks, so that the link is busy throughout.
//
// Memory order, reuse and progress: tiles.cuh. Tables, indices and offsets must not be written while the kernel runs.

inline constexpr int kMostTables = 64;  // per launch
inline constexpr int kBagThreads = 256;
inline constexpr int kMostAhead = 4;  // rows in flight per thread

struct BagTable {
  const void* rows;     // [count, row_bytes]
  const void* indices;  // [entries]
  const void* offsets;  // [bags], or one more: the start of each bag
  const void* weights;  // per index, in the table's format; null: 1
  uint32 entries, count;
  int number;  // index in the user's list
};

struct BagParams {
  TileLinks links;
  uint32 tables;        // of this launch
  uint32 ranks, batch;  // each table has ranks * batch bags, ordered by the rank of their samples
  uint32 units;         // accesses per row
  uint32 columns;       // groups per bag
  uint32 row_bytes;
  uint64 out_stride;  // stride of the result's samples, in bytes
  uint64 out_first;   // offset of the first of these tables in a sample, in bytes
  bool mean, last_offset;
  BagTable table[kMostTables];
};

#if defined(__CUDACC__)

// What one thread reads of a row at once: 16 bytes, or one element if rows are not a multiple of that.
template <class Format, bool kWide>
struct BagAccess {
  static constexpr int kWords = kWide ? 4 : 1;
  static constexpr int kBytes = kWide ? 16 : 4 / Format::kPerWord;
  static constexpr int kValues = kBytes * Format::kPerWord / 4;
  struct Raw {
    uint32 words[kWords];
  };

  static __device__ __forceinline__ Raw load(const char* from) {
    Raw raw;
    if constexpr (kWide) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(raw.words[0]), "=r"(raw.words[1]), "=r"(raw.words[2]), "=r"(raw.words[3])
                   : "l"(from));
    } else if constexpr (kBytes == 4) {
      asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(raw.words[0]) : "l"(from));
    } else {
      uint16 half;
      asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(half) : "l"(from));
      raw.words[0] = half;
    }
    return raw;
  }
  static __device__ __forceinline__ void decode(const Raw& raw, float* values) {
    if constexpr (kBytes >= 4) {
      ARK_UNROLL for (int w = 0; w < kWords; ++w) Format::decode(raw.words[w], values + w * Format::kPerWord);
    } else {
      float pair[2];
      Format::decode(raw.words[0], pair);
      values[0] = pair[0];
    }
  }
  static __device__ __forceinline__ void copy(char* to, const Raw& raw) {
    if constexpr (kWide) {
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(raw.words[0]), "r"(raw.words[1]),
                   "r"(raw.words[2]), "r"(raw.words[3])
                   : "memory");
    } else if constexpr (kBytes == 4) {
      *reinterpret_cast<uint32*>(to) = raw.words[0];
    } else {
      *reinterpret_cast<uint16*>(to) = static_cast<uint16>(raw.words[0]);
    }
  }
  static __device__ __forceinline__ void store(char* to, const float* values) {
    Raw raw;
    if constexpr (kBytes >= 4) {
      ARK_UNROLL for (int w = 0; w < kWords; ++w) raw.words[w] = Format::encode(values + w * Format::kPerWord);
    } else {
      const float pair[2] = {values[0], 0.0f};
      raw.words[0] = Format::encode(pair);
    }
    copy(to, raw);
  }
};

template <class Format>
__device__ __forceinline__ float load_weight(const void* weights, uint64 at) {
  float pair[2];
  if constexpr (Format::kPerWord == 1)
    Format::decode(static_cast<const uint32*>(weights)[at], pair);
  else
    Format::decode(static_cast<const uint16*>(weights)[at], pair);
  return pair[0];
}

template <class Format, class Index, bool kWide, int kLanes, bool kWeighted>
__device__ __forceinline__ void embedding_bag(const BagParams& p) {
  using Access = BagAccess<Format, kWide>;
  constexpr int kAhead = kLanes < kMostAhead ? kLanes : kMostAhead;
  constexpr int kValues = Access::kValues;
  constexpr uint32 kGroups = 32 / kLanes, kWarps = kBagThreads / 32, kAll = ~0u;
  begin_kernel();
  TileExchange exchange(p.links);
  const uint32 lane = threadIdx.x % kLanes, group = threadIdx.x % 32 / kLanes;
  const uint32 chunks = (p.batch + kGroups - 1) / kGroups, each = chunks * p.ranks * p.columns;
  uint32 at = blockIdx.x * kWarps + threadIdx.x / 32, t = 0;
  char* place = nullptr;
  uint32 placed = ~0u;  // the rank that `place` belongs to
  TileReport::Failure refused = TileReport::none;
  long long wrong = 0;
  for (;; at += gridDim.x * kWarps) {
    for (; t < p.tables && at >= each; ++t) at -= each;
    if (t >= p.tables) break;
    const BagTable& table = p.table[t];
    const uint32 number = at / p.columns, chunk = number / p.ranks;
    uint32 rank = number - chunk * p.ranks + p.links.rank + 1;  // peers first
    while (rank >= p.ranks) rank -= p.ranks;
    const uint32 sample = chunk * kGroups + group, unit = (at - number * p.columns) * kLanes + lane;
    const uint32 bag = rank * p.batch + sample;
    long long begin = 0, end = 0;
    if (sample < p.batch) {
      const auto* const offsets = static_cast<const Index*>(table.offsets);
      const bool ends = bag + 1 == p.ranks * p.batch && !p.last_offset;
      begin = offsets[bag], end = ends ? table.entries : static_cast<long long>(offsets[bag + 1]);
    }
    const bool fits = begin >= 0 && begin <= end && end <= table.entries && (bag != 0 || begin == 0);
    if (__any_sync(kAll, !fits)) {
      if (!fits) refused = TileReport::offset, wrong = begin;
      break;
    }
    const uint32 length = static_cast<uint32>(end - begin);
    const uint32 longest = kGroups == 1 ? length : __reduce_max_sync(kAll, length);
    const auto* const indices = static_cast<const Index*>(table.indices) + begin + lane;
    const char* const column = static_cast<const char*>(table.rows) + uint64{unit} * Access::kBytes;
    const bool active = unit < p.units;
    float total[kValues];
    ARK_UNROLL for (int v = 0; v < kValues; ++v) total[v] = 0.0f;
    for (uint32 base = 0; base < longest; base += kLanes) {
      const int most = static_cast<int>(min(longest - base, static_cast<uint32>(kLanes)));
      const int count = base < length ? static_cast<int>(min(length - base, static_cast<uint32>(kLanes))) : 0;
      long long index = 0;
      float weight = 1.0f;
      if (static_cast<int>(lane) < count) {
        index = indices[base];
        if constexpr (kWeighted) weight = load_weight<Format>(table.weights, static_cast<uint64>(begin) + base + lane);
      }
      const bool named = static_cast<int>(lane) >= count || static_cast<uint64>(index) < table.count;
      if (__any_sync(kAll, !named)) {
        if (!named) refused = TileReport::index, wrong = index;
        goto left;
      }
      const uint32 row = static_cast<uint32>(index);
      ARK_ROLLED for (int done = 0; done < most; done += kAhead) {
        typename Access::Raw raw[kAhead];
        ARK_UNROLL for (int i = 0; i < kAhead; ++i) {
          const uint32 next = __shfl_sync(kAll, row, (done + i) % kLanes, kLanes);
          if (done + i < count && active) raw[i] = Access::load(column + uint64{next} * p.row_bytes);
        }
        ARK_UNROLL for (int i = 0; i < kAhead; ++i) {
          float weighs = 1.0f;
          if constexpr (kWeighted) weighs = __shfl_sync(kAll, weight, (done + i) % kLanes, kLanes);
          if (done + i >= count || !active) continue;
          float values[kValues];
          Access::decode(raw[i], values);
          ARK_UNROLL for (int v = 0; v < kValues; ++v) total[v] =
              add(total[v], kWeighted ? multiply(values[v], weighs) : values[v]);
        }
      }
    }
    if (p.mean && length != 0) {
      const float count = static_cast<float>(length);
      ARK_UNROLL for (int v = 0; v < kValues; ++v) total[v] = divide(total[v], count);
    }
    if (placed != rank) {
      place = exchange.place_of(static_cast<int>(rank));
      placed = rank;
    }
    if (place == nullptr) break;
    if (active && sample < p.batch)
      Access::store(
          place + sample * p.out_stride + p.out_first + uint64{t} * p.row_bytes + uint64{unit} * Access::kBytes, total);
  }
left:
  if (refused != TileReport::none) {
    const BagTable& table = p.table[t];
    refuse_index(p.links.report, refused, table.number, wrong,
                 refused == TileReport::index ? table.count : table.entries);
  }
  exchange.finish();
}

#endif

}  // namespace ark::device
