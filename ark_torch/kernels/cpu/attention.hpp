// Attention of the query heads that share one key/value head: softmax(scale q k' + mask) v, over blocks of positions.
//
// Softmax runs along (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018): each row keeps its
// greatest score so far, the sum of exp(score - greatest) and the weighted sum of values, and rescales them when the
// greatest grows. A block of positions that the mask rules out for all rows (false, -inf, or behind a causal limit) is
// left before its keys or values are read, so that work follows the length in use. A row without any allowed position
// gives zeros, as PyTorch's does. Blocks begin at multiples of kKeys whatever the tile is: bits depend on data alone.
#pragma once

#include "cpu/loop.hpp"
#include "cpu/reduce.hpp"

namespace ark::cpu {

// Strides in elements; row t of query head g.
struct Attention {
  int64_t heads;  // that share the key/value head
  int64_t queries, keys;
  int64_t q_head, q_row, q_column;
  int64_t k_row, k_column;
  int64_t v_row, v_column;
  int64_t out_head, out_row, out_column;
  int64_t mask_head, mask_row, mask_column;
  float scale;
  bool causal;
};

struct NoMask {};

inline constexpr int kQueryRows = 16;  // handled together, so that a block of keys serves all from the cache
inline constexpr int kKeys = 64;       // positions in a block

constexpr int padded(int columns) {
  return (columns + kLanes - 1) / kLanes * kLanes;
}
// Bytes of scratch memory that attend() needs.
constexpr int64_t attention_scratch(int columns, int value_columns) {
  return kQueryRows * (padded(columns) + padded(value_columns)) * 4;
}

// Calls body(first column, lanes) for 16 columns at a time; their number is known to the compiler.
template <int Columns, class Body>
ARK_INLINE void each_chunk(Body&& body) {
  ARK_UNROLL for (int c = 0; c + kLanes <= Columns; c += kLanes) body(c, All{});
  if constexpr (Columns % kLanes != 0) body(Columns / kLanes * kLanes, First{Columns % kLanes});
}

template <class T, class Count>
ARK_INLINE auto load_any(const T* p, int64_t stride, Count lanes) {
  return stride == 1 ? load(p, lanes) : load_strided(p, stride, lanes);
}

// Lane i: the sum of all lanes of parts[i]. Neighbours are folded into halves, then quarters, ...
ARK_INLINE Floats sum_each(Floats (&parts)[kLanes]) {
#define ARK_LOW8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define ARK_HIGH8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define ARK_LOW4 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define ARK_HIGH4 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
#define ARK_LOW2 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29
#define ARK_HIGH2 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31
#define ARK_LOW1 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ARK_HIGH1 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define ARK_FOLD(n, size)                                                                                    \
  ARK_UNROLL for (int i = 0; i < n; ++i) {                                                                   \
    const Floats a = parts[2 * i], b = parts[2 * i + 1];                                                     \
    parts[i] = __builtin_shufflevector(a, b, ARK_LOW##size) + __builtin_shufflevector(a, b, ARK_HIGH##size); \
  }
  ARK_FOLD(8, 8)
  ARK_FOLD(4, 4)
  ARK_FOLD(2, 2)
  ARK_FOLD(1, 1)
#undef ARK_FOLD
#undef ARK_LOW8
#undef ARK_HIGH8
#undef ARK_LOW4
#undef ARK_HIGH4
#undef ARK_LOW2
#undef ARK_HIGH2
#undef ARK_LOW1
#undef ARK_HIGH1
  return parts[0];
}

// What is added to the scores of 16 positions: the mask, and -inf where the row may not look or there is no position.
template <class M, class Count>
ARK_INLINE Floats mask_of(const Attention& s, const M* mask, int64_t key, int64_t limit, Count lanes) {
  Floats bias{};
  if constexpr (std::is_same_v<M, bool>)
    bias = load_any(mask + key * s.mask_column, s.mask_column, lanes) ? splat(0.0f) : splat(-kInfinity);
  else if constexpr (!std::is_same_v<M, NoMask>)
    bias = load_any(mask + key * s.mask_column, s.mask_column, lanes);
  Mask seen = active(lanes);
  if (s.causal) seen &= narrow_mask(key + kIota <= limit);
  return seen ? bias : splat(-kInfinity);
}

// Scores of 16 positions from `key` on for one query row; those of positions at or past `end` are of no use.
template <int Columns, class K>
ARK_INLINE Floats scores_of(const Attention& s, const float* query, const K* k, int64_t key, int64_t end) {
  Floats parts[kLanes] = {};
  each_chunk<Columns>([&](int c, auto lanes) ARK_BODY {
    const Floats x = load(query + c, All{});
    ARK_UNROLL for (int i = 0; i < kLanes; ++i) {
      const int64_t at = key + i < end ? key + i : end - 1;  // nothing is read past the end
      parts[i] += x * load_any(k + at * s.k_row + c * s.k_column, s.k_column, lanes);
    }
  });
  return sum_each(parts);
}

// One query row, while blocks of positions go by.
struct QueryRow {
  float greatest = -kInfinity;
  float total = 0;
};

// Takes a block's positions [key, end) into the row: `scores` holds what the mask adds. `sums` are its weighted values.
template <int Columns, int ValueColumns, class K, class V>
ARK_INLINE void take_block(const Attention& s, QueryRow& row, const float* query, float* scores, float* sums,
                           const K* k, const V* v, int64_t key, int64_t end) {
  constexpr int kVectors = kKeys / kLanes, kChunks = padded(ValueColumns) / kLanes;
  Floats vectors[kVectors];
  Floats top = splat(row.greatest);
  for (int j = 0; j < kVectors; ++j) {
    const Floats bias = load(scores + j * kLanes, All{});
    vectors[j] = bias;
    if (any_of(bias != -kInfinity)) {
      const Floats score = scores_of<Columns>(s, query, k, key + j * kLanes, end) + bias;
      vectors[j] = bias != -kInfinity ? score : bias;  // what the mask hides may be anything, NaN as well
    }
    top = maximum(top, vectors[j]);
  }
  const float now = fold(top, [](float a, float b) { return a > b || a != a ? a : b; });
  if (now == -kInfinity) return;
  Floats weights{};
  for (int j = 0; j < kVectors; ++j) {
    const Floats weight = exp(vectors[j] - now);
    store(scores + j * kLanes, weight, All{});
    weights += weight;
  }
  const float before = one(exp(splat(row.greatest - now)));
  row.total = row.total * before + sum_of(weights);
  row.greatest = now;
  Floats sum[kChunks];
  ARK_UNROLL for (int i = 0; i < kChunks; ++i) sum[i] = load(sums + i * kLanes, All{}) * before;
  for (int64_t j = 0; j < end - key; ++j) {
    if (scores[j] == 0.0f) continue;
    const V* value = v + (key + j) * s.v_row;
    each_chunk<ValueColumns>([&](int c, auto lanes) ARK_BODY {
      sum[c / kLanes] += scores[j] * load_any(value + c * s.v_column, s.v_column, lanes);
    });
  }
  ARK_UNROLL for (int i = 0; i < kChunks; ++i) store(sums + i * kLanes, sum[i], All{});
}

// Columns: of queries and keys; ValueColumns: of values and of the result.
template <int Columns, int ValueColumns, class Q, class K, class V, class M, class Out>
inline void attend(const Context& context, const Attention& s, const Q* q, const K* k, const V* v, const M* mask,
                   Out* out) {
  float* const queries = reinterpret_cast<float*>(context.scratch);
  float* const sums = queries + kQueryRows * padded(Columns);
  alignas(64) float scores[kQueryRows][kKeys];

  // Row t * heads + g: rows that are handled together look at the same positions.
  const int64_t all_rows = s.queries * s.heads;
  for (int64_t first = 0; first < all_rows; first += kQueryRows) {
    const int rows = static_cast<int>(all_rows - first < kQueryRows ? all_rows - first : kQueryRows);
    QueryRow states[kQueryRows];
    for (int r = 0; r < rows; ++r) {
      const Q* from = q + (first + r) % s.heads * s.q_head + (first + r) / s.heads * s.q_row;
      each_chunk<Columns>([&](int c, auto lanes) ARK_BODY {
        store(queries + r * padded(Columns) + c, load_any(from + c * s.q_column, s.q_column, lanes) * s.scale, All{});
      });
      for (int c = 0; c < padded(ValueColumns); c += kLanes)
        store(sums + r * padded(ValueColumns) + c, Floats{}, All{});
    }
    const int64_t last_row = (first + rows - 1) / s.heads;
    const int64_t limit = s.causal && last_row + 1 < s.keys ? last_row + 1 : s.keys;
    for (int64_t key = 0; key < limit; key += kKeys) {
      const int64_t end = s.keys - key < kKeys ? s.keys : key + kKeys;
      bool any = false;
      for (int r = 0; r < rows; ++r) {
        const int64_t g = (first + r) % s.heads, t = (first + r) / s.heads;
        if (r > 0 && g > 0 && s.mask_head == 0) {  // as the head before
          std::memcpy(scores[r], scores[r - 1], sizeof(scores[r]));
          continue;
        }
        const M* row = mask + (std::is_same_v<M, NoMask> ? 0 : g * s.mask_head + t * s.mask_row);
        for (int64_t j = key; j < key + kKeys; j += kLanes) {
          Floats bias = splat(-kInfinity);
          if (j + kLanes <= end)
            bias = mask_of(s, row, j, t, All{});
          else if (j < end)
            bias = mask_of(s, row, j, t, First{static_cast<int>(end - j)});
          any = any || any_of(bias != -kInfinity);
          store(scores[r] + (j - key), bias, All{});
        }
      }
      if (!any) continue;
      for (int r = 0; r < rows; ++r)
        take_block<Columns, ValueColumns>(s, states[r], queries + r * padded(Columns), scores[r],
                                          sums + r * padded(ValueColumns), k, v, key, end);
    }
    for (int r = 0; r < rows; ++r) {
      Out* to = out + (first + r) % s.heads * s.out_head + (first + r) / s.heads * s.out_row;
      const float scale = states[r].total == 0.0f ? 0.0f : 1.0f / states[r].total;
      each_chunk<ValueColumns>([&](int c, auto lanes) ARK_BODY {
        const Floats x = load(sums + r * padded(ValueColumns) + c, All{}) * scale;
        if (s.out_column == 1)
          store(to + c, x, lanes);
        else
          store_strided(to + c * s.out_column, s.out_column, x, lanes);
      });
    }
  }
}

}  // namespace ark::cpu
