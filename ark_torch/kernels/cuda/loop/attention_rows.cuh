// What attention kernels share: the operands' strides, masks, the online softmax, the position that decoding appends.
#pragma once

#include "cuda/loop/task.cuh"
#include "cuda/loop/tensor.cuh"

namespace ark::loop {

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
  bool nan_rows;        // rows that attend to nothing give NaN, not zeros
  int64_t first_query;  // position of row 0, for `causal`
  bool aligned;         // rows of queries, keys and values are contiguous and start at multiples of 16 bytes
  Cache cache;          // of keys and values, with few rows
  bool part;            // of a split attention: sums stay unnormalized, and each row's maximum score and total are kept
};

struct NoMask {};

// Row t * heads + g: rows that are processed together attend to the same positions.
struct AttentionRow {
  int g, t;
  ARK_LOOP AttentionRow(const Attention& s, int row)
      : g(row % static_cast<int>(s.heads)), t(row / static_cast<int>(s.heads)) {}
};

// The end of the positions that rows before `end_row` attend to.
ARK_LOOP int limit_of(const Attention& s, int end_row) {
  const int keys = static_cast<int>(s.keys);
  const int next = (end_row - 1) / static_cast<int>(s.heads) + static_cast<int>(s.first_query) + 1;
  return s.causal && next < keys ? next : keys;
}

// What is added to a score; -inf if the row does not attend to the position, which must exist.
template <class M>
ARK_LOOP float bias_of(const Attention& s, const M* mask, AttentionRow row, int key) {
  if (s.causal && key > row.t + s.first_query) return -kInfinity;
  if constexpr (kSame<M, NoMask>) {
    return 0.0f;
  } else {
    const auto x = load_one(mask + row.g * s.mask_head + row.t * s.mask_row + key * s.mask_column);
    if constexpr (kSame<M, bool>)
      return x ? 0.0f : -kInfinity;
    else
      return x;
  }
}

// A score after masking. Masked positions are arbitrary and may give NaN.
template <class M>
ARK_LOOP float masked(float score, float scale, float bias, bool seen) {
  const float there = kIsFloat<M> ? fused(score, scale, bias) : score * scale;
  return seen ? there : -kInfinity;
}
template <class M>
ARK_LOOP float masked(float score, float scale, float bias) {
  return masked<M>(score, scale, bias, bias != -kInfinity);
}

// The base of exponents: the maximum score, or something finite while the row attends to nothing.
ARK_LOOP float base_of(float greatest) {
  return greatest == -kInfinity ? 0.0f : greatest;
}

// The final factor of a row's sums. If the row attends to nothing, the result is zero, or NaN with `nan_rows`.
ARK_LOOP float last_factor(float total, bool nan_rows) {
  return total == 0.0f && !nan_rows ? 0.0f : 1.0f / total;
}

// A row's parts and their weights, one part per lane of a half warp.
class PartWeights {
 public:
  static constexpr int kLanes = 16, kMost = kLanes;

  // The maximum score and total of part p are at states[p * stride].
  ARK_LOOP PartWeights(const float* states, int64_t stride, int count) {
    const int part = lane() % kLanes;
    float greatest = -kInfinity, total = 0;
    if (part < count) {
      greatest = states[part * stride];
      total = states[part * stride + 1];
    }
    greatest_ = greatest;
    ARK_UNROLL for (int other = kLanes / 2; other > 0; other /= 2) greatest_ =
        fmaxf(greatest_, shuffle_xor(greatest_, other));
    weight_ = expf(greatest - base_of(greatest_));
    total_ = total * weight_;
    ARK_UNROLL for (int other = kLanes / 2; other > 0; other /= 2) total_ += shuffle_xor(total_, other);
  }
  ARK_LOOP float of(int part) const { return shuffle_from<kLanes>(weight_, part); }
  ARK_LOOP float greatest() const { return greatest_; }
  ARK_LOOP float total() const { return total_; }

 private:
  float greatest_, total_, weight_;
};

// Column c of a row of the result.
template <Attention s, class Out>
ARK_LOOP void store_result(Out* out, float* states, AttentionRow row, int c, float sum, const PartWeights& parts) {
  Out* const to = out + row.g * s.out_head + row.t * s.out_row + c * s.out_column;
  if constexpr (s.part) {
    store_one(to, sum);
    if (c == 0) {
      float* const state = states + (row.g * s.queries + row.t) * 2;
      state[0] = parts.greatest();
      state[1] = parts.total();
    }
  } else {
    store_one(to, sum * last_factor(parts.total(), s.nan_rows));
  }
}

// A position that the task appends to keys and values before it attends to them (compiler/passes/kv_append.hpp).
struct NothingAdded {
  static constexpr bool kAny = false;
};
template <int Columns, int ValueColumns, class KAt, class VAt, class K, class V, class Make>
struct AddedPosition {
  static constexpr bool kAny = true;
  KAt k_at;
  VAt v_at;
  const K* new_k;
  const V* new_v;
  Make make;

  ARK_LOOP int64_t begin() const {
    const int64_t at = make();
    sync();
    return at;
  }
  template <Attention s>
  ARK_LOOP void store(int64_t at) const {
    if (at < 0 || at >= s.keys) return;
    K* const k = now(k_at);
    V* const v = now(v_at);
    for (int c = thread_anew(); c < Columns + ValueColumns; c += kThreads) {
      if (c < Columns)
        k[at * s.k_row + c * s.k_column] = new_k[c];
      else
        v[at * s.v_row + (c - Columns) * s.v_column] = new_v[c - Columns];
    }
  }
};

// 16 bytes of a row from column c on, zeros from kColumns on. `aligned`: as in Attention.
template <int kColumns, Cache kCache = Cache::normal, class T>
ARK_LOOP Chunk load_part(const T* row, int64_t stride, int c, bool aligned) {
  Chunk part{};
  if (kColumns % kPerChunk<T> == 0 && aligned) {
    if constexpr (kCache == Cache::normal) {
      if (c < kColumns) part = *reinterpret_cast<const Chunk*>(row + c);
    } else {
      ChunkLoads<kCache>().load(part, row + c, c < kColumns);
    }
  } else {
    ARK_UNROLL for (int i = 0; i < kPerChunk<T>; ++i) if (c + i < kColumns) set_element(part, i, row[(c + i) * stride]);
  }
  return part;
}

// Finds which of the kBlock positions from `key` on any of the rows attends to. Called by all threads; writes one word
// per warp for looked_at(). Returns whether there are any.
template <int kBlock, class M>
ARK_LOOP bool scan_block(const Attention& s, const M* mask, int first_row, int end_row, int key, int limit,
                         uint32* words) {
  const int self = thread_anew(), at = key + self % kBlock;
  // Among this many rows one stands for all.
  const int heads = static_cast<int>(s.heads);
  const int step = s.mask_head == 0 && !s.causal ? (s.mask_row == 0 ? end_row - first_row : heads) : 1;
  bool any = false;
  if (at < limit)
#pragma unroll 1
    for (int row = first_row + self / kBlock * step; row < end_row; row += kThreads / kBlock * step)
      any = any || bias_of(s, mask, AttentionRow(s, row), at) != -kInfinity;
  const uint32 word = ballot(any);
  if (lane() == 0) words[warp()] = word;
  return sync_any(any);
}
template <int kBlock>
ARK_LOOP bool looked_at(const uint32* words, int position) {
  constexpr int kStep = kBlock < 32 ? 1 : kBlock / 32;
  uint32 word = 0;
  ARK_UNROLL for (int w = 0; w < kWarps; w += kStep) word |= words[w + position / 32];
  if constexpr (kBlock == 16) word |= word >> 16;
  return (word >> (position % 32) & 1) != 0;
}

}  // namespace ark::loop
