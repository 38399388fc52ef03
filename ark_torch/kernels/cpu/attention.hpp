// Attention of the query heads that share one KV head: softmax(scale q k' + mask) v, over blocks of positions.
//
// The softmax is online (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018): each row keeps its
// maximum score so far, the sum of exp(score - maximum) and the weighted sum of values, and rescales both when the
// maximum grows. A block of positions that the mask excludes for all rows (false, -inf, or beyond a causal limit) is
// skipped before its keys or values are read, so work follows the length in use. A row without any allowed position
// gives zeros, as in PyTorch's operator, or NaN, as its softmax does. Blocks start at multiples of kKeys for any tile,
// so bits depend on data only.
#pragma once

#include "cpu/attention_block.hpp"

namespace ark::cpu {

// Strides in elements; row t of query head g.
struct Attention {
  int64_t heads;  // query heads per KV head
  int64_t queries, keys;
  int64_t q_head, q_row, q_column;
  int64_t k_row, k_column;
  int64_t v_row, v_column;
  int64_t out_head, out_row, out_column;
  int64_t mask_head, mask_row, mask_column;
  float scale;
  bool causal;
  bool nan_rows;  // rows without any allowed position give NaN, not zeros
};

struct NoMask {};

inline constexpr int kQueryRows = 16;  // processed together, so that all use a block of keys while it is cached
inline constexpr int kManyRows = 8;    // from this many rows on, keys are transposed

// Bytes of scratch memory that attend() needs.
constexpr int64_t attention_scratch(int columns, int value_columns) {
  return (kQueryRows * (padded(columns) + padded(value_columns)) + padded(columns) * kKeys) * 4;
}

// What is added to the scores of 16 positions: the mask, or -inf where the row does not attend or there is no position.
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

// The state of one query row across blocks of positions.
struct QueryRow {
  float greatest = -kInfinity;
  float total = 0;
};

// Turns a block's scores into weights, and rescales the row's sums so far.
template <int ValueColumns>
ARK_INLINE void soften(QueryRow& row, float* scores, float* sums) {
  Floats vectors[kKeyVectors];
  Floats top = splat(row.greatest);
  for (int j = 0; j < kKeyVectors; ++j) {
    vectors[j] = load(scores + j * kLanes, All{});
    top = maximum(top, vectors[j]);
  }
  const float now = fold(top, [](float a, float b) { return a > b || a != a ? a : b; });
  if (now == -kInfinity) {  // it attends to nothing so far
    for (int j = 0; j < kKeys; j += kLanes) store(scores + j, Floats{}, All{});
    return;
  }
  Floats weights{};
  for (int j = 0; j < kKeyVectors; ++j) {
    const Floats weight = exp(vectors[j] - now);
    store(scores + j * kLanes, weight, All{});
    weights += weight;
  }
  const float before = one(exp(splat(row.greatest - now)));
  row.total = row.total * before + sum_of(weights);
  if (row.greatest != now)
    for (int c = 0; c < padded(ValueColumns); c += kLanes) store(sums + c, load(sums + c, All{}) * before, All{});
  row.greatest = now;
}

// Sets the scores of `rows` rows from `first` on to what the mask adds. Returns whether any of them attends to the
// block.
template <class M>
ARK_INLINE bool mask_block(const Attention& s, const M* mask, int64_t first, int rows, int64_t key, int64_t end,
                           float* scores) {
  bool any = false;
  for (int r = 0; r < rows; ++r) {
    const int64_t g = (first + r) % s.heads, t = (first + r) / s.heads;
    if (r > 0 && g > 0 && s.mask_head == 0) {  // same as the previous head
      std::memcpy(scores + r * kKeys, scores + (r - 1) * kKeys, kKeys * sizeof(float));
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
      store(scores + r * kKeys + (j - key), bias, All{});
    }
  }
  return any;
}

// Columns: of queries and keys; ValueColumns: of values and of the result.
template <int Columns, int ValueColumns, class Q, class K, class V, class M, class Out>
inline void attend(const Context& context, const Attention& s, const Q* q, const K* k, const V* v, const M* mask,
                   Out* out) {
  constexpr int kQuery = padded(Columns), kValue = padded(ValueColumns);
  float* const queries = reinterpret_cast<float*>(context.scratch);
  float* const sums = queries + kQueryRows * kQuery;
  float* const transposed = sums + kQueryRows * kValue;
  alignas(64) float scores[kQueryRows * kKeys];
  const Positions<K> keys{k, s.k_row, s.k_column};
  const Positions<V> values{v, s.v_row, s.v_column};

  // Row t * heads + g: rows that are processed together attend to the same positions.
  const int64_t all_rows = s.queries * s.heads;
  for (int64_t first = 0; first < all_rows; first += kQueryRows) {
    const int rows = static_cast<int>(all_rows - first < kQueryRows ? all_rows - first : kQueryRows);
    QueryRow states[kQueryRows];
    for (int r = 0; r < rows; ++r) {
      const Q* from = q + (first + r) % s.heads * s.q_head + (first + r) / s.heads * s.q_row;
      each_chunk<Columns>([&](int c, auto lanes) ARK_BODY {
        store(queries + r * kQuery + c, load_any(from + c * s.q_column, s.q_column, lanes) * s.scale, All{});
      });
      for (int c = 0; c < kValue; c += kLanes) store(sums + r * kValue + c, Floats{}, All{});
    }
    const int64_t last_row = (first + rows - 1) / s.heads;
    const int64_t limit = s.causal && last_row + 1 < s.keys ? last_row + 1 : s.keys;
    for (int64_t key = 0; key < limit; key += kKeys) {
      const int64_t end = s.keys - key < kKeys ? s.keys : key + kKeys;
      if (!mask_block(s, mask, first, rows, key, end, scores)) continue;
      int r = 0;
      if (all_rows >= kManyRows) {
        transpose_keys<Columns>(keys, key, end, transposed);
        for (; r + kRowGroup <= rows; r += kRowGroup)
          score_rows<kRowGroup, Columns>(transposed, queries + r * kQuery, scores + r * kKeys);
        for (; r < rows; ++r) score_rows<1, Columns>(transposed, queries + r * kQuery, scores + r * kKeys);
      } else {
        for (; r < rows; ++r) score_row<Columns>(keys, key, end, queries + r * kQuery, scores + r * kKeys);
      }
      for (r = 0; r < rows; ++r) soften<ValueColumns>(states[r], scores + r * kKeys, sums + r * kValue);
      r = 0;
      for (; r + kRowGroup <= rows; r += kRowGroup)
        add_values<kRowGroup, ValueColumns>(values, key, end, scores + r * kKeys, sums + r * kValue);
      for (; r < rows; ++r) add_values<1, ValueColumns>(values, key, end, scores + r * kKeys, sums + r * kValue);
    }
    for (int r = 0; r < rows; ++r) {
      Out* to = out + (first + r) % s.heads * s.out_head + (first + r) / s.heads * s.out_row;
      const float scale = states[r].total == 0.0f && !s.nan_rows ? 0.0f : 1.0f / states[r].total;
      each_chunk<ValueColumns>([&](int c, auto lanes) ARK_BODY {
        const Floats x = load(sums + r * kValue + c, All{}) * scale;
        if (s.out_column == 1)
          store(to + c, x, lanes);
        else
          store_strided(to + c * s.out_column, s.out_column, x, lanes);
      });
    }
  }
}

}  // namespace ark::cpu
