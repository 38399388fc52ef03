// Embedding bags: the table rows that a bag names, pooled by sum, mean or maximum in the bag's order.
//
// Bag b is indices [offsets[b], offsets[b + 1]); the last one ends at the last index, or at a last offset. The padding
// index is ignored; an empty bag gives zeros. Sums are float32. Every offset and index is checked before its row is
// read; an invalid one ends the step with an error. Prefetched rows are not read: their indices need no check.
#pragma once

#include "cpu/launch.hpp"
#include "cpu/ops.hpp"

namespace ark::cpu {

// Strides in elements.
struct Bags {
  int64_t table_rows, table_row, table_column;
  int64_t indices, index, offset;
  int64_t bags;
  bool last_offset;
  int64_t weight;
  int64_t out_row, out_column;
  int64_t padding;
};

enum class Pooling { sum, mean, max };
struct NoWeights {};

inline constexpr int64_t kRowsAhead = 32;  // that are asked for, of this bag and of later ones

// Columns [c, c + Vectors * 16) of one bag; `lanes` says how many lanes of the last vector count.
template <Pooling kMode, Prefetch kPrefetch, int Vectors, class T, class I, class W, class Out, class Last>
ARK_INLINE void pool_columns(const Bags& s, const T* table, const I* index, int64_t from, int64_t to, int64_t count,
                             const W* weights, Out* out, int64_t c, Last last) {
  Floats total[Vectors] = {};
  bool first = true;
  for (int64_t i = from; i < to; ++i) {
    const int64_t row = load_one(index + i * s.index);
    if (row == s.padding) continue;
    if (kPrefetch == Prefetch::ahead && i + kRowsAhead < s.indices) {
      const auto later = static_cast<uint64_t>(load_one(index + (i + kRowsAhead) * s.index));
      const uint64_t elements = later * static_cast<uint64_t>(s.table_row) + static_cast<uint64_t>(c * s.table_column);
      const uint64_t at = reinterpret_cast<uint64_t>(table) + elements * sizeof(T);
      ARK_UNROLL for (int v = 0; v < Vectors; ++v)
          __builtin_prefetch(reinterpret_cast<const void*>(at + static_cast<uint64_t>(v) * kLanes * sizeof(T)), 0, 3);
    }
    Floats weight = splat(1.0f);
    if constexpr (!std::is_same_v<W, NoWeights>) weight = splat(load_one(weights + i * s.weight));
    ARK_UNROLL for (int v = 0; v < Vectors; ++v) {
      const T* at = table + row * s.table_row + (c + v * kLanes) * s.table_column;
      auto part = [&](auto lanes) ARK_BODY {
        return s.table_column == 1 ? load(at, lanes) : load_strided(at, s.table_column, lanes);
      };
      const Floats x = v == Vectors - 1 ? part(last) : part(All{});
      if constexpr (kMode == Pooling::max)
        total[v] = first ? x : x > total[v] ? x : total[v];
      else if constexpr (!std::is_same_v<W, NoWeights>)
        total[v] += x * weight;
      else
        total[v] += x;
    }
    first = false;
  }
  if (kMode == Pooling::mean && count > 0)
    for (Floats& sum : total) sum = sum / splat(static_cast<float>(count));
  ARK_UNROLL for (int v = 0; v < Vectors; ++v) {
    Out* const at = out + (c + v * kLanes) * s.out_column;
    auto put = [&](auto lanes) ARK_BODY {
      if (s.out_column == 1)
        store(at, total[v], lanes);
      else
        store_strided(at, s.out_column, total[v], lanes);
    };
    if (v == Vectors - 1)
      put(last);
    else
      put(All{});
  }
}

// Offsets are reported without a dimension (step_failure.cpp names them).
ARK_INLINE bool offset_fits(const Context& context, int64_t offset, int64_t most) {
  return index_fits(context, offset, most + 1, offset, -1);
}

// Bags [b0, b1) and columns [c0, c1).
template <Pooling kMode, Prefetch kPrefetch = Prefetch::usual, class T, class I, class O, class W, class Out>
inline void pool(const Context& context, const Bags& s, const T* table, const I* index, const O* offsets,
                 const W* weights, Out* out, int64_t b0, int64_t b1, int64_t c0, int64_t c1) {
  if (!offset_fits(context, load_one(offsets), 0)) return;  // the first bag must start at the first index
  for (int64_t b = b0; b < b1; ++b) {
    const int64_t from = load_one(offsets + b * s.offset);
    const bool ends = b + 1 == s.bags && !s.last_offset;
    const int64_t to = ends ? s.indices : load_one(offsets + (b + 1) * s.offset);
    if (!offset_fits(context, from, s.indices) || !offset_fits(context, to, s.indices)) return;
    if (!offset_fits(context, from, to)) return;
    int64_t count = 0;
    for (int64_t i = from; i < to; ++i) {
      const int64_t row = load_one(index + i * s.index);
      if (!index_fits(context, row, s.table_rows)) return;
      if (row != s.padding) ++count;
    }
    Out* const row = out + b * s.out_row;
    constexpr int kVectors = 4;
    int64_t c = c0;
    for (; c + kVectors * kLanes <= c1; c += kVectors * kLanes)
      pool_columns<kMode, kPrefetch, kVectors>(s, table, index, from, to, count, weights, row, c, All{});
    for_columns(c, c1, [&](int64_t column, auto lanes) ARK_BODY {
      pool_columns<kMode, kPrefetch, 1>(s, table, index, from, to, count, weights, row, column, lanes);
    });
  }
}

}  // namespace ark::cpu
