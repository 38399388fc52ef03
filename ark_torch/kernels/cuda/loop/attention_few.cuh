// Attention of a few query rows without tensor cores, as in decoding: float32, long heads, any strides.
//
// Warps take turns at blocks of positions. A warp's lanes are along columns, 16 bytes each; if a row needs few lanes, a
// warp loads several positions side by side, and several more are in flight. Every warp keeps an online softmax of the
// rows over its blocks; they are combined in warp order.
#pragma once

#include "cuda/loop/attention_rows.cuh"

namespace ark::loop {

template <int Columns, int ValueColumns, class K, class V>
struct FewRows {
  static ARK_LOOP constexpr int lanes_for(int parts) { return parts <= 4 ? 4 : parts <= 8 ? 8 : parts <= 16 ? 16 : 32; }
  static ARK_LOOP constexpr int in_wholes(int count, int whole) { return (count + whole - 1) / whole; }
  static constexpr int kKeyLanes = lanes_for(in_wholes(Columns, kPerChunk<K>));
  static constexpr int kValueLanes = lanes_for(in_wholes(ValueColumns, kPerChunk<V>));
  static constexpr int kLanes = kKeyLanes > kValueLanes ? kKeyLanes : kValueLanes;  // per position
  static constexpr int kBeside = 32 / kLanes;                                       // positions side by side
  static constexpr int kParts = in_wholes(Columns, kLanes* kPerChunk<K>);           // 16-byte chunks per lane
  static constexpr int kValueParts = in_wholes(ValueColumns, kLanes* kPerChunk<V>);
  static constexpr int kNumbers = kParts * kPerChunk<K>, kValueNumbers = kValueParts * kPerChunk<V>;
  static constexpr bool kShort = kNumbers <= 4 && kValueNumbers <= 4;
  static constexpr int kRows = kShort ? 4 : 2;                   // processed together
  static constexpr int kStates = kWarps * kRows * ValueColumns;  // after the sums, in floats
  static_assert((kStates + kWarps * kRows * 2) * 4 <= kWorkspaceBytes);
};

template <class Shape, int kRows, int Columns, int ValueColumns, Cache kCache, class Q, class K, class V, class M>
ARK_LOOP void share_positions(const Attention& s, const Q* q, const K* k, const V* v, const M* mask, int first,
                              float* shared) {
  constexpr int kDeep = Shape::kShort && kRows == 1 ? 4 : 2;  // positions in flight per lane
  constexpr int kBlock = kDeep * Shape::kBeside;
  const int position = lane() / Shape::kLanes, i = lane() % Shape::kLanes;
  const int all_rows = static_cast<int>(s.heads * s.queries);
  const int end_row = first + kRows < all_rows ? first + kRows : all_rows;
  const int limit = limit_of(s, end_row);

  float query[kRows][Shape::kNumbers];
  ARK_UNROLL for (int r = 0; r < kRows; ++r) ARK_UNROLL for (int e = 0; e < Shape::kNumbers; ++e) {
    const AttentionRow row(s, first + r);
    const int c = (e / kPerChunk<K> * Shape::kLanes + i) * kPerChunk<K> + e % kPerChunk<K>;
    query[r][e] =
        first + r < all_rows && c < Columns ? load_one(q + row.g * s.q_head + row.t * s.q_row + c * s.q_column) : 0.0f;
  }
  float greatest[kRows], total[kRows] = {}, sums[kRows][Shape::kValueNumbers] = {};
  ARK_UNROLL for (int r = 0; r < kRows; ++r) greatest[r] = -kInfinity;

  for (int key = warp() * kBlock; key < limit; key += kWarps * kBlock) {
    float scores[kDeep][kRows];  // initially what the mask adds
    bool looks[kDeep], any = false;
    ARK_UNROLL for (int n = 0; n < kDeep; ++n) {
      const int at = key + n * Shape::kBeside + position;
      looks[n] = false;
      ARK_UNROLL for (int r = 0; r < kRows; ++r) {
        scores[n][r] =
            at < limit && first + r < all_rows ? bias_of(s, mask, AttentionRow(s, first + r), at) : -kInfinity;
        looks[n] = looks[n] || scores[n][r] != -kInfinity;
      }
      any = any || looks[n];
    }
    if (ballot(any) == 0) continue;

    Chunk keys[kDeep][Shape::kParts] = {};
    ARK_UNROLL for (int n = 0; n < kDeep; ++n) ARK_UNROLL for (int part = 0; part < Shape::kParts; ++part) if (looks[n])
        keys[n][part] = load_part<Columns, kCache>(k + (key + n * Shape::kBeside + position) * s.k_row, s.k_column,
                                                   (part * Shape::kLanes + i) * kPerChunk<K>, s.aligned);
    Chunk values[kDeep][Shape::kValueParts] = {};
    ARK_UNROLL for (int n = 0; n < kDeep; ++n)
        ARK_UNROLL for (int part = 0; part < Shape::kValueParts; ++part) if (looks[n]) values[n][part] =
            load_part<ValueColumns, kCache>(v + (key + n * Shape::kBeside + position) * s.v_row, s.v_column,
                                            (part * Shape::kLanes + i) * kPerChunk<V>, s.aligned);

    ARK_UNROLL for (int n = 0; n < kDeep; ++n) {
      float dots[kRows] = {};
      ARK_UNROLL for (int e = 0; e < Shape::kNumbers; ++e) {
        const float x = chunk_element<K>(keys[n][e / kPerChunk<K>], e % kPerChunk<K>);
        ARK_UNROLL for (int r = 0; r < kRows; ++r) dots[r] = fused(query[r][e], x, dots[r]);
      }
      ARK_UNROLL for (int r = 0; r < kRows; ++r) {
        ARK_UNROLL for (int other = Shape::kLanes / 2; other > 0; other /= 2) dots[r] += shuffle_xor(dots[r], other);
        scores[n][r] = masked<M>(dots[r], s.scale, scores[n][r]);
      }
    }
    ARK_UNROLL for (int r = 0; r < kRows; ++r) {
      float now = greatest[r];
      ARK_UNROLL for (int n = 0; n < kDeep; ++n) now = fmaxf(now, scores[n][r]);
      ARK_UNROLL for (int other = Shape::kLanes; other < 32; other *= 2) now = fmaxf(now, shuffle_xor(now, other));
      const float base = base_of(now), before = expf(greatest[r] - base);
      greatest[r] = now;
      total[r] *= before;
      ARK_UNROLL for (int e = 0; e < Shape::kValueNumbers; ++e) sums[r][e] *= before;
      ARK_UNROLL for (int n = 0; n < kDeep; ++n) {
        scores[n][r] = expf(scores[n][r] - base);
        total[r] += scores[n][r];
      }
    }
    ARK_UNROLL for (int n = 0; n < kDeep; ++n) ARK_UNROLL for (int e = 0; e < Shape::kValueNumbers; ++e) {
      const float x = chunk_element<V>(values[n][e / kPerChunk<V>], e % kPerChunk<V>);
      ARK_UNROLL for (int r = 0; r < kRows; ++r) sums[r][e] = fused(scores[n][r], x, sums[r][e]);
    }
  }

  ARK_UNROLL for (int r = 0; r < kRows; ++r) {
    ARK_UNROLL for (int other = Shape::kLanes; other < 32; other *= 2) total[r] += shuffle_xor(total[r], other);
    if (lane() == 0) {
      float* const state = shared + Shape::kStates + (warp() * kRows + r) * 2;
      state[0] = greatest[r];
      state[1] = total[r];
    }
    ARK_UNROLL for (int e = 0; e < Shape::kValueNumbers; ++e) {
      ARK_UNROLL for (int other = Shape::kLanes; other < 32; other *= 2) sums[r][e] += shuffle_xor(sums[r][e], other);
      const int c = (e / kPerChunk<V> * Shape::kLanes + i) * kPerChunk<V> + e % kPerChunk<V>;
      if (position == 0 && c < ValueColumns) shared[(warp() * kRows + r) * ValueColumns + c] = sums[r][e];
    }
  }
}

template <int kRows, int Columns, int ValueColumns, Attention kShape, class Q, class K, class V, class M, class Out>
ARK_LOOP void attend_few_plainly(const Q* q, const K* k, const V* v, const M* mask, Out* out, float* states) {
  constexpr Attention s = kShape;
  using Shape = FewRows<Columns, ValueColumns, K, V>;
  constexpr int kRuns = (ValueColumns + 31) / 32;  // of 32 columns
  float* const shared = reinterpret_cast<float*>(workspace());
  const int all_rows = static_cast<int>(s.heads * s.queries);
  for (int first = 0; first < all_rows; first += kRows) {
    share_positions<Shape, kRows, Columns, ValueColumns, s.cache>(s, q, k, v, mask, first, shared);
    sync();
    const int rows = all_rows - first < kRows ? all_rows - first : kRows;
#pragma unroll 1
    for (int item = warp(); item < rows * kRuns; item += kWarps) {
      const int r = item / kRuns, c = item % kRuns * 32 + lane();
      const PartWeights parts(shared + Shape::kStates + r * 2, kRows * 2, kWarps);
      const float* const part = shared + r * ValueColumns + (c < ValueColumns ? c : 0);
      float sum = 0;
      ARK_UNROLL for (int w = 0; w < kWarps; ++w) sum = fused(part[w * kRows * ValueColumns], parts.of(w), sum);
      if (c < ValueColumns) store_result<s>(out, states, AttentionRow(s, first + r), c, sum, parts);
    }
    sync();
  }
}

template <int Columns, int ValueColumns, Attention kShape, class Q, class K, class V, class M, class Out>
ARK_LOOP void attend_few_plainly(const Q* q, const K* k, const V* v, const M* mask, Out* out, float* states) {
  constexpr Attention s = kShape;
  if constexpr (s.heads * s.queries == 1)
    attend_few_plainly<1, Columns, ValueColumns, s>(q, k, v, mask, out, states);
  else
    attend_few_plainly<FewRows<Columns, ValueColumns, K, V>::kRows, Columns, ValueColumns, s>(q, k, v, mask, out,
                                                                                              states);
}

}  // namespace ark::loop
