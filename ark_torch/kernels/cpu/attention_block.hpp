// The inner loops of attention over one block of positions: scores of query rows, then weighted sums of values.
//
// Scores are computed in two ways, depending on how many rows attend to a block. With few rows (decoding), 16 lanes are
// along a key's columns, and keys are read once, in place. With many rows (prefill), the block is transposed once, 16
// lanes are 16 positions, and each loaded element serves several rows. Values are added for one row or several at a
// time.
#pragma once

#include "cpu/launch.hpp"
#include "cpu/reduce.hpp"
#include "cpu/wide.hpp"

namespace ark::cpu {

inline constexpr int kKeys = 64;  // positions per block
inline constexpr int kKeyVectors = kKeys / kLanes;
#if defined(__AVX512F__)
inline constexpr int kRowGroup = 4;       // query rows that share a load,
inline constexpr int kVectorsAtOnce = 4;  // and vectors of a row: 16 sums in registers
#elif defined(__AVX__)
inline constexpr int kRowGroup = 4;
inline constexpr int kVectorsAtOnce = 2;
#else
inline constexpr int kRowGroup = 2;
inline constexpr int kVectorsAtOnce = 2;
#endif

constexpr int padded(int columns) {
  return (columns + kLanes - 1) / kLanes * kLanes;
}

template <class T, class Count>
ARK_INLINE auto load_any(const T* p, int64_t stride, Count lanes) {
  return stride == 1 ? load(p, lanes) : load_strided(p, stride, lanes);
}

// Calls body(first column, lanes) for 16 columns at a time. Lane counts are compile-time constants.
template <int Columns, class Body>
ARK_INLINE void each_chunk(Body&& body) {
  ARK_UNROLL for (int c = 0; c + kLanes <= Columns; c += kLanes) body(c, All{});
  if constexpr (Columns % kLanes != 0) body(Columns / kLanes * kLanes, First{Columns % kLanes});
}

// Rows of keys or values; strides in elements.
template <class T>
struct Positions {
  const T* first;
  int64_t row, column;
};

template <int... Lane>
struct Lanes {
  // The lower (upper) half of every `2 * Size` lanes of a and b.
  template <int Size, bool kUpper>
  static ARK_INLINE Floats halves(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, (Lane / Size * 2 * Size + Lane % Size + (kUpper ? Size : 0))...);
  }
  // Alternates `Size` lanes of a and of b: the lower (upper) half of every `2 * Size` of both.
  template <int Size, bool kUpper>
  static ARK_INLINE Floats in_turns(Floats a, Floats b) {
    return __builtin_shufflevector(a, b,
                                   ((Lane / Size % 2 == 0 ? Lane : Lane - Size + kLanes) + (kUpper ? Size : 0))...);
  }
};
using AllLanes = Lanes<ARK_LANES>;

template <int Size>
ARK_INLINE void fold_each(Floats (&parts)[kLanes]) {
  ARK_UNROLL for (int i = 0; i < Size; ++i) {
    const Floats a = parts[2 * i], b = parts[2 * i + 1];
    parts[i] = AllLanes::halves<Size, false>(a, b) + AllLanes::halves<Size, true>(a, b);
  }
}

// Lane i becomes the sum of all lanes of parts[i]: neighbors are folded to halves, then quarters, ...
ARK_INLINE Floats sum_each(Floats (&parts)[kLanes]) {
  if constexpr (kLanes == 16) fold_each<8>(parts);
  fold_each<4>(parts);
  fold_each<2>(parts);
  fold_each<1>(parts);
  return parts[0];
}

template <int Size>
ARK_INLINE void exchange(Floats (&parts)[kLanes]) {
  ARK_UNROLL for (int i = 0; i < kLanes; ++i) {
    if ((i & Size) != 0) continue;
    const Floats a = parts[i], b = parts[i + Size];
    parts[i] = AllLanes::in_turns<Size, false>(a, b);
    parts[i + Size] = AllLanes::in_turns<Size, true>(a, b);
  }
}

// parts[i][j] becomes parts[j][i]: blocks of 8, 4, 2 and 1 are exchanged.
ARK_INLINE void transpose(Floats (&parts)[kLanes]) {
  if constexpr (kLanes == 16) exchange<8>(parts);
  exchange<4>(parts);
  exchange<2>(parts);
  exchange<1>(parts);
}

// A score after masking. Masked positions are arbitrary and may give NaN.
ARK_INLINE Floats masked(Floats score, Floats bias) {
  return bias != -kInfinity ? score + bias : bias;
}

// Scores of one row; initially `scores` holds what the mask adds. Reads nothing at or past `end`.
template <int Columns, class K>
ARK_INLINE void score_row(const Positions<K>& k, int64_t key, int64_t end, const float* query, float* scores) {
  for (int j = 0; j < kKeys; j += kLanes) {
    const Floats bias = load(scores + j, All{});
    if (!any_of(bias != -kInfinity)) continue;
    Floats parts[kLanes] = {};
    each_chunk<Columns>([&](int c, auto lanes) ARK_BODY {
      const Floats x = load(query + c, All{});
      ARK_UNROLL for (int i = 0; i < kLanes; ++i) {
        const int64_t at = key + j + i < end ? key + j + i : end - 1;
        parts[i] += x * load_any(k.first + at * k.row + c * k.column, k.column, lanes);
      }
    });
    store(scores + j, masked(sum_each(parts), bias), All{});
  }
}

// Transposes the block's keys to columns.
template <int Columns, class K>
ARK_INLINE void transpose_keys(const Positions<K>& k, int64_t key, int64_t end, float* transposed) {
  for (int j = 0; j < kKeys; j += kLanes)
    each_chunk<Columns>([&](int c, auto lanes) ARK_BODY {
      Floats parts[kLanes];
      ARK_UNROLL for (int i = 0; i < kLanes; ++i) {
        const int64_t at = key + j + i < end ? key + j + i : end - 1;
        parts[i] = load_any(k.first + at * k.row + c * k.column, k.column, lanes);
      }
      transpose(parts);
      ARK_UNROLL for (int i = 0; i < kLanes; ++i) store(transposed + (c + i) * kKeys + j, parts[i], All{});
    });
}

// Scores of `Rows` rows, at strides padded(Columns) for queries and kKeys for scores.
template <int Rows, int Columns>
ARK_INLINE void score_rows(const float* transposed, const float* queries, float* scores) {
  static_assert(kKeyVectors % kVectorsAtOnce == 0);
  for (int first = 0; first < kKeyVectors; first += kVectorsAtOnce) {
    Wide total[Rows][kVectorsAtOnce] = {};
    for (int c = 0; c < Columns; ++c) {
      Wide x[kVectorsAtOnce];
      ARK_UNROLL for (int j = 0; j < kVectorsAtOnce; ++j) x[j] =
          load_wide(transposed + c * kKeys + (first + j) * kLanes, All{});
      ARK_UNROLL for (int r = 0; r < Rows; ++r) {
        const Wide query = wide_of(queries[r * padded(Columns) + c]);
        ARK_UNROLL for (int j = 0; j < kVectorsAtOnce; ++j) add_product(total[r][j], query, x[j]);
      }
    }
    ARK_UNROLL for (int r = 0; r < Rows; ++r) ARK_UNROLL for (int j = 0; j < kVectorsAtOnce; ++j) {
      float* const at = scores + r * kKeys + (first + j) * kLanes;
      store(at, masked(narrow(total[r][j]), load(at, All{})), All{});
    }
  }
}

// sums[r] += weights[r] values for `Rows` rows at stride padded(Columns). Skips positions that no row attends to.
template <int Rows, int Columns, class V>
ARK_INLINE void add_values(const Positions<V>& v, int64_t key, int64_t end, const float* weights, float* sums) {
  constexpr int kMost = kVectorsAtOnce * kLanes * (Rows == 1 ? kRowGroup : 1);
  constexpr int kWidth = padded(Columns) < kMost ? padded(Columns) : kMost;
  constexpr int kChunks = kWidth / kLanes;
  for (int first = 0; first < padded(Columns); first += kWidth) {
    Wide sum[Rows][kChunks];
    ARK_UNROLL for (int r = 0; r < Rows; ++r)
        ARK_UNROLL for (int i = 0; i < kChunks; ++i) if (first + i * kLanes < padded(Columns)) sum[r][i] =
            load_wide(sums + r * padded(Columns) + first + i * kLanes, All{});
    for (int64_t j = 0; j < end - key; ++j) {
      bool any = false;
      for (int r = 0; r < Rows; ++r) any = any || weights[r * kKeys + j] != 0.0f;
      if (!any) continue;
      const V* value = v.first + (key + j) * v.row;
      ARK_UNROLL for (int i = 0; i < kChunks; ++i) {
        const int c = first + i * kLanes;
        if (c >= Columns) continue;
        Wide x;
        if (c + kLanes > Columns)
          x = wide(load_any(value + c * v.column, v.column, First{Columns % kLanes}));
        else if (v.column == 1)
          x = load_wide(value + c, All{});
        else
          x = wide(load_strided(value + c * v.column, v.column, All{}));
        ARK_UNROLL for (int r = 0; r < Rows; ++r) add_product(sum[r][i], wide_of(weights[r * kKeys + j]), x);
      }
    }
    ARK_UNROLL for (int r = 0; r < Rows; ++r)
        ARK_UNROLL for (int i = 0; i < kChunks; ++i) if (first + i * kLanes < padded(Columns))
            store(sums + r * padded(Columns) + first + i * kLanes, narrow(sum[r][i]), All{});
  }
}

}  // namespace ark::cpu
