// Attention of many query rows without tensor cores: float32, heads of more than 128 numbers, mixed types.
//
// 64 rows at a time (32 for long heads); each half warp has two (one). Its lanes take every 16th position of a block
// for scores, and four adjacent value columns for sums. Queries and blocks of keys and values are in shared memory as
// float32, and so are weights, between scores and sums.
#pragma once

#include "cuda/loop/attention_rows.cuh"

namespace ark::loop {

template <int Columns, int ValueColumns>
struct PlainTiles {
  static constexpr int kLongest = Columns > ValueColumns ? Columns : ValueColumns;
  static constexpr int kLaneRows = kLongest <= 128 ? 2 : 1, kRows = kWarps * 2 * kLaneRows;
  static constexpr int kBlock = kLongest <= 64 ? 64 : kLongest <= 128 ? 32 : 16, kLanePositions = kBlock / 16;
  static constexpr int kParts = (ValueColumns + 63) / 64;  // of 64 value columns
  // Row strides in floats: 16 bytes of padding avoid bank conflicts.
  static constexpr int kUsed = (Columns + 3) / 4 * 4, kRow = kUsed + 4, kValueRow = kParts * 64,
                       kWeightRow = kBlock + 4;
  static constexpr int kKeys = kRows * kRow, kValues = kKeys + kBlock * kRow, kWeights = kValues + kBlock * kValueRow;
  static constexpr int kLooks = kWeights + kRows * kWeightRow;
  static_assert((kLooks + kWarps) * 4 <= kWorkspaceBytes);
};

struct alignas(16) FourFloats {
  float x[4];
};
ARK_LOOP const FourFloats& four_at(const float* p) {
  return *reinterpret_cast<const FourFloats*>(p);
}

// Copies rows to shared memory; rows that are not wanted, and columns from kColumns to kUsed, become zeros.
template <int kColumns, int kUsed, int kRow, int kCount, class Row, class Wanted>
ARK_LOOP void widen_rows(float* to, int64_t column, Row row_at, Wanted wanted) {
  ARK_UNROLL for (int e = thread_anew(); e < kCount * kUsed; e += kThreads) {
    const int row = e / kUsed, c = e % kUsed;
    to[row * kRow + c] = c < kColumns && wanted(row) ? load_one(row_at(row) + c * column) : 0.0f;
  }
}

// A lane's state for its rows; `own` are their indices in the tile.
template <class Shape>
struct PlainRows {
  float greatest[Shape::kLaneRows], total[Shape::kLaneRows] = {};
  float sums[Shape::kLaneRows][Shape::kParts][4] = {};
  ARK_LOOP PlainRows() { ARK_UNROLL for (int r = 0; r < Shape::kLaneRows; ++r) greatest[r] = -kInfinity; }
};

template <class Shape, class M>
ARK_LOOP void attend_block(const Attention& s, const M* mask, float* shared, int first_row, int key, int limit,
                           PlainRows<Shape>& rows) {
  const int self = thread_anew(), i = self & 15, own = self / 16 * Shape::kLaneRows;
  const int all_rows = static_cast<int>(s.heads * s.queries);

  float scores[Shape::kLaneRows][Shape::kLanePositions] = {};
#pragma unroll 2
  for (int c = 0; c < Shape::kUsed; c += 4) {
    FourFloats query[Shape::kLaneRows];
    ARK_UNROLL for (int r = 0; r < Shape::kLaneRows; ++r) query[r] = four_at(shared + (own + r) * Shape::kRow + c);
    ARK_UNROLL for (int n = 0; n < Shape::kLanePositions; ++n) {
      const FourFloats x = four_at(shared + Shape::kKeys + (i + 16 * n) * Shape::kRow + c);
      ARK_UNROLL for (int r = 0; r < Shape::kLaneRows; ++r) ARK_UNROLL for (int e = 0; e < 4; ++e) scores[r][n] =
          fused(query[r].x[e], x.x[e], scores[r][n]);
    }
  }

  float* const weights = shared + Shape::kWeights + own * Shape::kWeightRow;
  ARK_UNROLL for (int r = 0; r < Shape::kLaneRows; ++r) {
    const int number = first_row + own + r;
    const AttentionRow row(s, number);
    float now = rows.greatest[r];
    ARK_UNROLL for (int n = 0; n < Shape::kLanePositions; ++n) {
      const int at = key + i + 16 * n;
      const float bias = at < limit && number < all_rows ? bias_of(s, mask, row, at) : -kInfinity;
      scores[r][n] = masked<M>(scores[r][n], s.scale, bias);
      now = fmaxf(now, scores[r][n]);
    }
    ARK_UNROLL for (int other = 8; other > 0; other /= 2) now = fmaxf(now, shuffle_xor(now, other));
    const float base = base_of(now), before = expf(rows.greatest[r] - base);
    rows.greatest[r] = now;
    rows.total[r] *= before;
    ARK_UNROLL for (int part = 0; part < Shape::kParts; ++part) ARK_UNROLL for (int e = 0; e < 4; ++e)
        rows.sums[r][part][e] *= before;
    ARK_UNROLL for (int n = 0; n < Shape::kLanePositions; ++n) {
      const float weight = expf(scores[r][n] - base);
      rows.total[r] += weight;
      weights[r * Shape::kWeightRow + i + 16 * n] = weight;
    }
  }
  sync_warp();

#pragma unroll 2
  for (int j = 0; j < Shape::kBlock; j += 4) {
    FourFloats weight[Shape::kLaneRows];
    ARK_UNROLL for (int r = 0; r < Shape::kLaneRows; ++r) weight[r] = four_at(weights + r * Shape::kWeightRow + j);
    ARK_UNROLL for (int n = 0; n < 4; ++n) ARK_UNROLL for (int part = 0; part < Shape::kParts; ++part) {
      const FourFloats x = four_at(shared + Shape::kValues + (j + n) * Shape::kValueRow + part * 64 + i * 4);
      ARK_UNROLL for (int r = 0; r < Shape::kLaneRows; ++r) ARK_UNROLL for (int e = 0; e < 4; ++e)
          rows.sums[r][part][e] = fused(weight[r].x[n], x.x[e], rows.sums[r][part][e]);
    }
  }
}

template <int Columns, int ValueColumns, class Q, class K, class V, class M, class Out>
ARK_LOOP void attend_plainly(const Attention& s, const Q* q, const K* k, const V* v, const M* mask, Out* out) {
  const int all_rows = static_cast<int>(s.heads * s.queries);
  using Shape = PlainTiles<Columns, ValueColumns>;
  float* const shared = reinterpret_cast<float*>(workspace());
  uint32* const looks = reinterpret_cast<uint32*>(shared + Shape::kLooks);
  for (int first = 0; first < all_rows; first += Shape::kRows) {
    const int end = all_rows - first < Shape::kRows ? all_rows : first + Shape::kRows;
    const int limit = limit_of(s, end);
    widen_rows<Columns, Shape::kUsed, Shape::kRow, Shape::kRows>(
        shared, s.q_column,
        [&](int row) {
          const AttentionRow at(s, first + row);
          return q + at.g * s.q_head + at.t * s.q_row;
        },
        [&](int row) { return first + row < end; });
    PlainRows<Shape> rows;
    for (int key = 0; key < limit; key += Shape::kBlock) {
      if (!scan_block<Shape::kBlock>(s, mask, first, end, key, limit, looks)) {
        sync();
        continue;
      }
      const auto wanted = [&](int row) { return looked_at<Shape::kBlock>(looks, row); };
      widen_rows<Columns, Shape::kUsed, Shape::kRow, Shape::kBlock>(
          shared + Shape::kKeys, s.k_column, [&](int row) { return k + (key + row) * s.k_row; }, wanted);
      widen_rows<ValueColumns, ValueColumns, Shape::kValueRow, Shape::kBlock>(
          shared + Shape::kValues, s.v_column, [&](int row) { return v + (key + row) * s.v_row; }, wanted);
      sync();
      attend_block(s, mask, shared, first, key, limit, rows);
      sync();
    }
    const int i = lane() & 15;
    ARK_UNROLL for (int r = 0; r < Shape::kLaneRows; ++r) {
      ARK_UNROLL for (int other = 8; other > 0; other /= 2) rows.total[r] += shuffle_xor(rows.total[r], other);
      const int number = first + thread() / 16 * Shape::kLaneRows + r;
      if (number >= end) continue;
      const AttentionRow row(s, number);
      const float factor = last_factor(rows.total[r], s.nan_rows);
      Out* const to = out + row.g * s.out_head + row.t * s.out_row;
      ARK_UNROLL for (int part = 0; part < Shape::kParts; ++part) ARK_UNROLL for (int e = 0; e < 4; ++e) {
        const int c = part * 64 + i * 4 + e;
        if (c < ValueColumns) store_one(to + c * s.out_column, rows.sums[r][part][e] * factor);
      }
    }
    sync();
  }
}

}  // namespace ark::loop
