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

constexpr int64_t attention_scratch(int64_t columns) {
  return 2 * kQueryRows * ((columns + kLanes - 1) / kLanes * kLanes) * 4;
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

template <int Columns, class Q, class K, class V, class M, class Out>
inline void attend(const Context& context, const Attention& s, const Q* q, const K* k, const V* v, const M* mask,
                   Out* out) {
  constexpr int kChunks = (Columns + kLanes - 1) / kLanes, kPadded = kChunks * kLanes;
  constexpr int kVectors = kKeys / kLanes;
  auto each_chunk = [](auto&& body) ARK_BODY {
    for (int chunk = 0; chunk < Columns / kLanes; ++chunk) body(chunk, All{});
    if constexpr (Columns % kLanes != 0) body(Columns / kLanes, First{Columns % kLanes});
  };
  float* const queries = reinterpret_cast<float*>(context.scratch);
  float* const sums = queries + kQueryRows * kPadded;
  alignas(64) float scores[kQueryRows][kKeys];
  float greatest[kQueryRows], total[kQueryRows];

  // Row t * heads + g: rows that are handled together look at the same positions.
  const int64_t all_rows = s.queries * s.heads;
  for (int64_t first = 0; first < all_rows; first += kQueryRows) {
    const int rows = static_cast<int>(all_rows - first < kQueryRows ? all_rows - first : kQueryRows);
    for (int r = 0; r < rows; ++r) {
      const Q* from = q + (first + r) % s.heads * s.q_head + (first + r) / s.heads * s.q_row;
      each_chunk([&](int chunk, auto lanes) ARK_BODY {
        const Floats x = load_any(from + chunk * kLanes * s.q_column, s.q_column, lanes);
        store(queries + r * kPadded + chunk * kLanes, x * s.scale, All{});
        store(sums + r * kPadded + chunk * kLanes, Floats{}, All{});
      });
      greatest[r] = -kInfinity;
      total[r] = 0;
    }
    const int64_t last_row = (first + rows - 1) / s.heads;
    const int64_t end = s.causal && last_row + 1 < s.keys ? last_row + 1 : s.keys;
    for (int64_t key = 0; key < end; key += kKeys) {
      const int64_t keys = s.keys - key < kKeys ? s.keys - key : kKeys;
      bool any = false;
      for (int r = 0; r < rows; ++r) {
        const int64_t g = (first + r) % s.heads, t = (first + r) / s.heads;
        if (r > 0 && g > 0 && s.mask_head == 0) {  // as the head before
          std::memcpy(scores[r], scores[r - 1], sizeof(scores[r]));
          continue;
        }
        const M* row = mask + (std::is_same_v<M, NoMask> ? 0 : g * s.mask_head + t * s.mask_row);
        for (int64_t j = 0; j < kKeys; j += kLanes) {
          Floats bias = splat(-kInfinity);
          if (j + kLanes <= keys)
            bias = mask_of(s, row, key + j, t, All{});
          else if (j < keys)
            bias = mask_of(s, row, key + j, t, First{static_cast<int>(keys - j)});
          any = any || any_of(bias != -kInfinity);
          store(scores[r] + j, bias, All{});
        }
      }
      if (!any) continue;

      for (int r = 0; r < rows; ++r) {
        Floats vectors[kVectors];
        Floats top = splat(greatest[r]);
        for (int j = 0; j < kVectors; ++j) {
          vectors[j] = load(scores[r] + j * kLanes, All{});
          if (any_of(vectors[j] != -kInfinity)) {
            Floats parts[kLanes] = {};
            each_chunk([&](int chunk, auto lanes) ARK_BODY {
              const Floats x = load(queries + r * kPadded + chunk * kLanes, All{});
              ARK_UNROLL for (int i = 0; i < kLanes; ++i) {
                // Past the end the last position is read once more; its score is -inf.
                const int64_t at = j * kLanes + i < keys ? key + j * kLanes + i : s.keys - 1;
                parts[i] += x * load_any(k + at * s.k_row + chunk * kLanes * s.k_column, s.k_column, lanes);
              }
            });
            vectors[j] += sum_each(parts);
          }
          top = maximum(top, vectors[j]);
        }
        const float now = fold(top, [](float a, float b) { return a > b || a != a ? a : b; });
        if (now == -kInfinity) {
          for (int j = 0; j < kKeys; j += kLanes) store(scores[r] + j, Floats{}, All{});
          continue;
        }
        Floats weights{};
        for (int j = 0; j < kVectors; ++j) {
          const Floats weight = exp(vectors[j] - now);
          store(scores[r] + j * kLanes, weight, All{});
          weights += weight;
        }
        const float before = one(exp(splat(greatest[r] - now)));
        total[r] = total[r] * before + sum_of(weights);
        greatest[r] = now;
        Floats sum[kChunks];
        ARK_UNROLL for (int chunk = 0; chunk < kChunks; ++chunk) sum[chunk] =
            load(sums + r * kPadded + chunk * kLanes, All{}) * before;
        for (int64_t j = 0; j < keys; ++j) {
          const Floats weight = splat(scores[r][j]);
          each_chunk([&](int chunk, auto lanes) ARK_BODY {
            sum[chunk] += weight * load_any(v + (key + j) * s.v_row + chunk * kLanes * s.v_column, s.v_column, lanes);
          });
        }
        ARK_UNROLL for (int chunk = 0; chunk < kChunks; ++chunk)
            store(sums + r * kPadded + chunk * kLanes, sum[chunk], All{});
      }
    }
    for (int r = 0; r < rows; ++r) {
      Out* to = out + (first + r) % s.heads * s.out_head + (first + r) / s.heads * s.out_row;
      const float scale = total[r] == 0.0f ? 0.0f : 1.0f / total[r];
      each_chunk([&](int chunk, auto lanes) ARK_BODY {
        const Floats x = load(sums + r * kPadded + chunk * kLanes, All{}) * scale;
        if (s.out_column == 1)
          store(to + chunk * kLanes, x, lanes);
        else
          store_strided(to + chunk * kLanes * s.out_column, s.out_column, x, lanes);
      });
    }
  }
}

}  // namespace ark::cpu
