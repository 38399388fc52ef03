// Attention of a few query rows over many positions on tensor cores, as in decoding.
//
// Eight rows at a time. Warps take turns at blocks of positions (with more than 64 value columns, groups of warps do,
// with 64 columns per warp). Every warp keeps an online softmax of all rows over its blocks; finally they are combined
// in warp order. Keys and values go from memory to registers 16 bytes at a time and are used as they arrive, since the
// assignment of columns to a product's depth is free. Products are transposed (keys times queries), so that eight rows
// fill a tile.
#pragma once

#include "cuda/loop/attention_rows.cuh"

namespace ark::loop {

// If every warp has at most one block, as in a split attention (compiler/passes/split_kv.hpp), all loads are in flight
// at once, including the mask's. Masked positions are then loaded in vain, but no load waits for another one. The code
// runs once or twice, from a cold instruction cache, so it is kept short and its loops are not unrolled.

inline constexpr int kDecodeRows = 8;

template <int Columns, int ValueColumns, Attention s, class M>
struct Decode {
  static constexpr int kSteps = (Columns + 31) / 32;  // of 32 columns
  static constexpr int kParts = ValueColumns <= 64 ? 1 : ValueColumns <= 128 ? 2 : 4;
  static constexpr int kGroups = kWarps / kParts;
  // Units of 16 positions whose loads are in flight together: as many as registers allow.
  static constexpr int kUnits = Columns <= 64 && !kIsFloat<M> && s.keys > kGroups * 16 ? 2 : 1;
  static constexpr int kBlock = 16 * kUnits;
  static constexpr bool kOnce = s.keys <= kGroups * kBlock;
  static constexpr bool kWhole = s.keys % kBlock == 0 && !s.causal;  // every block is full
  // The mask adds the same to all rows.
  static constexpr bool kOneBias = s.mask_head == 0 && (s.mask_row == 0 || s.queries == 1) && !s.causal;
  // Shared memory in floats: a warp's sums (16 registers, padded to avoid bank conflicts), each row's maximum and
  // total.
  static constexpr int kSums = 16 * 33;
  static constexpr int kStates = kWarps * kSums;
  static_assert((kStates + kWarps * kDecodeRows * 2) * 4 <= kWorkspaceBytes);
};

// Whether every warp has a single block and goes through its rows once. All loads from memory are then issued before
// the new position is computed.
template <int Columns, int ValueColumns, Attention s, class Q, class K, class V, class M>
ARK_LOOP constexpr bool adds_at_once() {
  if constexpr (kSame<Q, K> && kSame<K, V> && sizeof(Q) == 2 && Columns <= 128 && ValueColumns <= 128 &&
                Columns % 8 == 0 && ValueColumns % 8 == 0 && s.heads * s.queries <= kDecodeRows && s.aligned) {
    using Shape = Decode<Columns, ValueColumns, s, M>;
    return Shape::kWhole && s.keys == Shape::kGroups * Shape::kBlock;
  } else {
    return false;
  }
}

// The work of one warp. Lane 4 i + j has positions i and i + 8 of a unit, and rows 2 j and 2 j + 1. Returns the
// position that was appended.
template <int Columns, int ValueColumns, Attention kShape, class T, class QAt, class KAt, class VAt, class M,
          class Added>
ARK_LOOP int64_t decode_rows(QAt q, KAt k, VAt v, const M* mask, int first, float* shared, const Added& added) {
  constexpr Attention s = kShape;
  using Shape = Decode<Columns, ValueColumns, s, M>;
  constexpr int kBiases = Shape::kOneBias ? 1 : 2;
  int i, j, part;
  const auto place = [&](int self) {
    i = self % 32 >> 2;
    j = self & 3;
    part = self / 32 / Shape::kGroups;
  };
  const int self = thread_anew();  // re-read here and below: no register keeps anything of it across heads
  place(self);
  const int group = self / 32 % Shape::kGroups;
  constexpr int kRows = static_cast<int>(s.heads * s.queries);
  const int limit = limit_of(s, first + kDecodeRows < kRows ? first + kDecodeRows : kRows);
  const auto row_at = [](int number) { return AttentionRow(s, number < kRows ? number : kRows - 1); };

  Chunk query[Shape::kSteps] = {};
  const auto load_query = [&] {
    const AttentionRow row = row_at(first + i);
    const T* const from = now(q);
    ARK_UNROLL for (int step = 0; step < Shape::kSteps; ++step) query[step] =
        load_part<Columns>(from + row.g * s.q_head + row.t * s.q_row, s.q_column, step * 32 + j * 8, true);
  };
  if constexpr (!Added::kAny) load_query();
  int64_t added_at = -1;
  // For long heads or many positions the programs that make the new position leave no registers for values in flight.
  constexpr bool kValuesLast = Added::kAny && (Columns > 64 || Shape::kUnits > 1);
  static_assert(!kValuesLast || (Shape::kOnce && Shape::kWhole));
  const AttentionRow rows[2] = {row_at(first + 2 * j), row_at(first + 2 * j + 1)};

  float greatest[2] = {-kInfinity, -kInfinity}, total[2] = {};
  float sums[4][4] = {};  // tile n: value columns 8 i + 2 n (elements 0 and 1: of both rows) and 8 i + 2 n + 1
#pragma unroll 1
  for (int key = group * Shape::kBlock; key < limit; key += Shape::kGroups * Shape::kBlock) {
    float bias[Shape::kUnits][2][kBiases];  // position i or i + 8; row
    ARK_UNROLL for (int u = 0; u < Shape::kUnits; ++u) ARK_UNROLL for (int h = 0; h < 2; ++h)
        ARK_UNROLL for (int r = 0; r < kBiases; ++r) {
      const int at = key + u * 16 + h * 8 + i;
      bias[u][h][r] = Shape::kWhole || at < limit ? bias_of(s, mask, rows[r], at) : -kInfinity;
    }

    Chunk keys[Shape::kUnits][2][Shape::kSteps] = {};
    Chunk values[Shape::kUnits][2][2] = {};   // positions 2 j and 2 j + 1, and the same 8 on
    using Wanted = uint32[Shape::kUnits][2];  // four bits per position
    const auto load_keys = [&](const Wanted& wanted) {
      const T* const keys_at = now(k);
      ARK_UNROLL for (int u = 0; u < Shape::kUnits; ++u) ARK_UNROLL for (int h = 0; h < 2; ++h) {
        if ((wanted[u][h] >> (4 * i) & 15) == 0) continue;
        const T* const from = keys_at + (key + u * 16 + h * 8 + i) * s.k_row;
        ARK_UNROLL for (int step = 0; step < Shape::kSteps; ++step) keys[u][h][step] =
            load_part<Columns, s.cache>(from, s.k_column, step * 32 + j * 8, true);
      }
    };
    const auto load_values = [&](const Wanted& wanted) {
      const T* const values_at = now(v);
      ARK_UNROLL for (int u = 0; u < Shape::kUnits; ++u) ARK_UNROLL for (int h = 0; h < 2; ++h)
          ARK_UNROLL for (int e = 0; e < 2; ++e) {
        if ((wanted[u][h] >> (8 * j + 4 * e) & 15) == 0) continue;
        values[u][h][e] = load_part<ValueColumns, s.cache>(values_at + (key + u * 16 + h * 8 + 2 * j + e) * s.v_row,
                                                           s.v_column, part * 64 + i * 8, true);
      }
    };
    if constexpr (Shape::kOnce) {
      Wanted there;
      ARK_UNROLL for (int u = 0; u < Shape::kUnits; ++u) ARK_UNROLL for (int h = 0; h < 2; ++h) {
        const int count = limit - (key + u * 16 + h * 8);
        there[u][h] = Shape::kWhole || count >= 8 ? ~0u : count <= 0 ? 0 : (1u << (4 * count)) - 1;
      }
      load_keys(there);
      if constexpr (!kValuesLast) load_values(there);
    }
    if constexpr (Added::kAny) {  // every warp has exactly one block, so all threads call begin()
      added_at = added.begin();
      place(thread_anew());  // not kept in a register across the call
      load_query();
      if constexpr (kValuesLast) {
        Wanted all;
        ARK_UNROLL for (int u = 0; u < Shape::kUnits; ++u) all[u][0] = all[u][1] = ~0u;
        load_values(all);
      }
      ARK_UNROLL for (int u = 0; u < Shape::kUnits; ++u) ARK_UNROLL for (int h = 0; h < 2; ++h) {
        const int64_t at = added_at - (key + u * 16 + h * 8);
        if (at == i)
          ARK_UNROLL for (int step = 0; step < Shape::kSteps; ++step) keys[u][h][step] =
              load_part<Columns>(added.new_k, 1, step * 32 + j * 8, true);
        ARK_UNROLL for (int e = 0; e < 2; ++e) if (at == 2 * j + e) values[u][h][e] =
            load_part<ValueColumns>(added.new_v, 1, part * 64 + i * 8, true);
      }
    }
    Wanted looks;  // which lanes attend to which positions
    uint32 any = 0;
    ARK_UNROLL for (int u = 0; u < Shape::kUnits; ++u) ARK_UNROLL for (int h = 0; h < 2; ++h) {
      bool seen = bias[u][h][0] != -kInfinity;
      if constexpr (kBiases == 2) seen = seen || bias[u][h][1] != -kInfinity;
      any |= looks[u][h] = ballot(seen);
    }
    if constexpr (Shape::kOnce) {
      // Values that no row attends to are arbitrary and may be NaN: zero them.
      ARK_UNROLL for (int u = 0; u < Shape::kUnits; ++u) ARK_UNROLL for (int h = 0; h < 2; ++h)
          ARK_UNROLL for (int e = 0; e < 2; ++e) if ((looks[u][h] >> (8 * j + 4 * e) & 15) == 0) values[u][h][e] =
              Chunk{};
    } else {
      if (any == 0) continue;
      load_keys(looks);
      load_values(looks);
    }

    float scores[Shape::kUnits][4] = {};  // of positions i (both rows) and i + 8
    ARK_UNROLL for (int u = 0; u < Shape::kUnits; ++u) ARK_UNROLL for (int step = 0; step < Shape::kSteps; ++step) {
      const auto &a = keys[u][0][step].words, &b = keys[u][1][step].words, &c = query[step].words;
      multiply_add<T>(scores[u], {a[0], b[0], a[1], b[1]}, c[0], c[1]);
      multiply_add<T>(scores[u], {a[2], b[2], a[3], b[3]}, c[2], c[3]);
    }
    float base[2];
    ARK_UNROLL for (int r = 0; r < 2; ++r) {
      float now = greatest[r];
      ARK_UNROLL for (int u = 0; u < Shape::kUnits; ++u) ARK_UNROLL for (int h = 0; h < 2; ++h) {
        scores[u][2 * h + r] = masked<M>(scores[u][2 * h + r], s.scale, bias[u][h][r % kBiases]);
        now = fmaxf(now, scores[u][2 * h + r]);
      }
      ARK_UNROLL for (int other = 4; other < 32; other *= 2) now = fmaxf(now, shuffle_xor(now, other));
      base[r] = base_of(now);
      if constexpr (!Shape::kOnce) {
        const float before = fast_exp(greatest[r] - base[r]);
        total[r] *= before;
        ARK_UNROLL for (int n = 0; n < 4; ++n) ARK_UNROLL for (int h = 0; h < 2; ++h) sums[n][2 * h + r] *= before;
      }
      greatest[r] = now;
    }
    ARK_UNROLL for (int u = 0; u < Shape::kUnits; ++u) {
      uint32 weights[2];
      ARK_UNROLL for (int h = 0; h < 2; ++h) {
        const float x = fast_exp(scores[u][2 * h] - base[0]), y = fast_exp(scores[u][2 * h + 1] - base[1]);
        total[0] += x;
        total[1] += y;
        weights[h] = transpose_tile(pack_two(x, y, T{}));
      }
      ARK_UNROLL for (int n = 0; n < 4; ++n) {
        const uint32 a = values[u][0][0].words[n], b = values[u][0][1].words[n];
        const uint32 c = values[u][1][0].words[n], d = values[u][1][1].words[n];
        multiply_add<T>(sums[n], {low_halves(a, b), high_halves(a, b), low_halves(c, d), high_halves(c, d)}, weights[0],
                        weights[1]);
      }
    }
  }

  const int last = thread_anew(), lane = last & 31, own = last >> 5;
  ARK_UNROLL for (int n = 0; n < 4; ++n) ARK_UNROLL for (int e = 0; e < 4; ++e)
      shared[own * Shape::kSums + (n * 4 + e) * 33 + lane] = sums[n][e];
  ARK_UNROLL for (int r = 0; r < 2; ++r) {
    ARK_UNROLL for (int other = 4; other < 32; other *= 2) total[r] += shuffle_xor(total[r], other);
    if (lane < 4) {
      float* const state = shared + Shape::kStates + (own * kDecodeRows + 2 * lane + r) * 2;
      state[0] = greatest[r];
      state[1] = total[r];
    }
  }
  return added_at;
}

template <int Columns, int ValueColumns, Attention kShape, class T, class QAt, class KAt, class VAt, class M,
          class OutAt, class StatesAt, class Added = NothingAdded>
ARK_LOOP void attend_few(QAt q, KAt k, VAt v, const M* mask, OutAt out, StatesAt states, const Added& added = {}) {
  constexpr Attention s = kShape;
  using Shape = Decode<Columns, ValueColumns, s, M>;
  constexpr int kRows = static_cast<int>(s.heads * s.queries), kRuns = (ValueColumns + 31) / 32;  // of 32 columns
  float* const shared = reinterpret_cast<float*>(workspace());
#pragma unroll 1
  for (int first = 0; first < kRows; first += kDecodeRows) {
    const int64_t at = decode_rows<Columns, ValueColumns, s, T>(q, k, v, mask, first, shared, added);
    if constexpr (Added::kAny) added.template store<s>(at);
    sync();
    const int rows = kRows - first < kDecodeRows ? kRows - first : kDecodeRows;
#pragma unroll 1
    for (int self = thread_anew(), item = self / 32; item < rows * kRuns; item += kWarps) {
      const int r = item / kRuns, c = item % kRuns * 32 + self % 32;
      const PartWeights parts(shared + Shape::kStates + r * 2, kDecodeRows * 2, Shape::kGroups);
      const float* const part = shared + c / 64 * Shape::kGroups * Shape::kSums +
                                ((c % 8 / 2) * 4 + c % 2 * 2 + r % 2) * 33 + c % 64 / 8 * 4 + r / 2;
      float sum = 0;
      ARK_UNROLL for (int g = 0; g < Shape::kGroups; ++g) sum = fused(part[g * Shape::kSums], parts.of(g), sum);
      if (c < ValueColumns) store_result<s>(now(out), now(states), AttentionRow(s, first + r), c, sum, parts);
    }
    sync();
  }
}

}  // namespace ark::loop
