// Attention of a few query rows over many positions, on tensor cores: decoding.
//
// Eight rows at a time. Warps take blocks of positions in turn, or, of more than 64 value columns, so do groups of
// warps that have 64 columns each; every warp keeps the running softmax of all rows over its own blocks, and at the
// end they are combined in the order of warps. Keys and values go from memory to registers 16 bytes at a time and are
// used as they land: which column is which of a product's depth, and which value column which of its rows, is free to
// choose. Products are transposed (keys times queries), so that eight rows fill a tile.
#pragma once

#include "cuda/loop/attention_rows.cuh"

namespace ark::loop {

inline constexpr int kDecodeRows = 8;

template <int Columns, int ValueColumns, class M>
struct Decode {
  static constexpr int kSteps = (Columns + 31) / 32;  // of 32 columns
  static constexpr int kParts = ValueColumns <= 64 ? 1 : ValueColumns <= 128 ? 2 : 4;
  static constexpr int kGroups = kWarps / kParts;
  // Of 16 positions, whose loads are under way together: what registers allow.
  static constexpr int kUnits = Columns <= 64 && !kIsFloat<M> ? 2 : 1;
  static constexpr int kBlock = 16 * kUnits;
  // Of shared memory, in floats: sums of a warp (16 registers, a bank apart), and of each row greatest and total.
  static constexpr int kSums = 16 * 33;
  static constexpr int kStates = kWarps * kSums;
};

// What one warp does. Lane 4 i + j: positions i and i + 8 of a unit, rows 2 j and 2 j + 1.
template <int Columns, int ValueColumns, class T, class M>
ARK_LOOP void decode_rows(const Attention& s, const T* q, const T* k, const T* v, const M* mask, int first,
                          float* shared) {
  using Shape = Decode<Columns, ValueColumns, M>;
  const int i = lane() >> 2, j = lane() & 3;
  const int part = warp() / Shape::kGroups, group = warp() % Shape::kGroups;
  const int all_rows = static_cast<int>(s.heads * s.queries);

  Chunk query[Shape::kSteps] = {};
  if (first + i < all_rows) {
    const AttentionRow row(s, first + i);
    ARK_UNROLL for (int step = 0; step < Shape::kSteps; ++step) query[step] =
        load_part<Columns>(q + row.g * s.q_head + row.t * s.q_row, s.q_column, step * 32 + j * 8, true);
  }
  const AttentionRow rows[2] = {AttentionRow(s, first + 2 * j), AttentionRow(s, first + 2 * j + 1)};
  const bool exists[2] = {first + 2 * j < all_rows, first + 2 * j + 1 < all_rows};
  const int end_row = first + kDecodeRows < all_rows ? first + kDecodeRows : all_rows;
  const int limit = limit_of(s, end_row);

  float greatest[2] = {-kInfinity, -kInfinity}, total[2] = {};
  float sums[4][4] = {};  // tile n: value columns 8 i + 2 n (numbers 0, 1: of both rows) and 8 i + 2 n + 1
  for (int key = group * Shape::kBlock; key < limit; key += Shape::kGroups * Shape::kBlock) {
    float bias[Shape::kUnits][2][2];  // position i or i + 8; row
    uint32 seen = 0;                  // a bit for each of them
    uint32 looks[Shape::kUnits][2];   // who looks there, four bits a position
    uint32 any = 0;
    ARK_UNROLL for (int u = 0; u < Shape::kUnits; ++u) ARK_UNROLL for (int h = 0; h < 2; ++h) {
      const int at = key + u * 16 + h * 8 + i;
      ARK_UNROLL for (int r = 0; r < 2; ++r) bias[u][h][r] =
          at < limit && exists[r] ? bias_of(s, mask, rows[r], at) : -kInfinity;
      ARK_UNROLL for (int r = 0; r < 2; ++r) seen |= (bias[u][h][r] != -kInfinity ? 1u : 0u) << (u * 4 + h * 2 + r);
      looks[u][h] = ballot((seen >> (u * 4 + h * 2) & 3) != 0);
      any |= looks[u][h];
    }
    if (any == 0) continue;

    Chunk keys[Shape::kUnits][2][Shape::kSteps] = {};
    ARK_UNROLL for (int u = 0; u < Shape::kUnits; ++u) ARK_UNROLL for (int h = 0; h < 2; ++h) {
      if ((looks[u][h] >> (4 * i) & 15) == 0) continue;
      const T* const from = k + (key + u * 16 + h * 8 + i) * s.k_row;
      ARK_UNROLL for (int step = 0; step < Shape::kSteps; ++step) keys[u][h][step] =
          load_part<Columns>(from, s.k_column, step * 32 + j * 8, true);
    }
    Chunk values[Shape::kUnits][2][2] = {};  // positions 2 j and 2 j + 1, the same 8 on
    ARK_UNROLL for (int u = 0; u < Shape::kUnits; ++u) ARK_UNROLL for (int h = 0; h < 2; ++h)
        ARK_UNROLL for (int e = 0; e < 2; ++e) {
      if ((looks[u][h] >> (8 * j + 4 * e) & 15) == 0) continue;
      values[u][h][e] = load_part<ValueColumns>(v + (key + u * 16 + h * 8 + 2 * j + e) * s.v_row, s.v_column,
                                                part * 64 + i * 8, true);
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
        scores[u][2 * h + r] =
            masked<M>(scores[u][2 * h + r], s.scale, bias[u][h][r], (seen >> (u * 4 + h * 2 + r) & 1) != 0);
        now = fmaxf(now, scores[u][2 * h + r]);
      }
      ARK_UNROLL for (int other = 4; other < 32; other *= 2) now = fmaxf(now, shuffle_xor(now, other));
      base[r] = base_of(now);
      const float before = fast_exp(greatest[r] - base[r]);
      greatest[r] = now;
      total[r] *= before;
      ARK_UNROLL for (int n = 0; n < 4; ++n) ARK_UNROLL for (int h = 0; h < 2; ++h) sums[n][2 * h + r] *= before;
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

  const int self = thread(), own = self >> 5;
  ARK_UNROLL for (int n = 0; n < 4; ++n) ARK_UNROLL for (int e = 0; e < 4; ++e)
      shared[own * Shape::kSums + (n * 4 + e) * 33 + (self & 31)] = sums[n][e];
  ARK_UNROLL for (int r = 0; r < 2; ++r) {
    ARK_UNROLL for (int other = 4; other < 32; other *= 2) total[r] += shuffle_xor(total[r], other);
    if ((self & 31) < 4) {
      float* const state = shared + Shape::kStates + (own * kDecodeRows + 2 * (self & 3) + r) * 2;
      state[0] = greatest[r];
      state[1] = total[r];
    }
  }
}

template <int Columns, int ValueColumns, class T, class M, class Out>
ARK_LOOP void attend_few(const Attention& s, const T* q, const T* k, const T* v, const M* mask, Out* out) {
  using Shape = Decode<Columns, ValueColumns, M>;
  float* const shared = reinterpret_cast<float*>(workspace());
  const int all_rows = static_cast<int>(s.heads * s.queries);
  for (int first = 0; first < all_rows; first += kDecodeRows) {
    decode_rows<Columns, ValueColumns>(s, q, k, v, mask, first, shared);
    sync();
    const int rows = all_rows - first < kDecodeRows ? all_rows - first : kDecodeRows;
    for (int e = thread(); e < rows * ValueColumns; e += kThreads) {
      const int r = e / ValueColumns, c = e % ValueColumns;
      const float* const state = shared + Shape::kStates + r * 2;
      const float* const part = shared + c / 64 * Shape::kGroups * Shape::kSums +
                                ((c % 8 / 2) * 4 + c % 2 * 2 + r % 2) * 33 + c % 64 / 8 * 4 + r / 2;
      float greatest = -kInfinity, total = 0, sum = 0;
      ARK_UNROLL for (int g = 0; g < Shape::kGroups; ++g) greatest = fmaxf(greatest, state[g * kDecodeRows * 2]);
      ARK_UNROLL for (int g = 0; g < Shape::kGroups; ++g) {
        const float weight = fast_exp(state[g * kDecodeRows * 2] - base_of(greatest));
        total = fused(state[g * kDecodeRows * 2 + 1], weight, total);
        sum = fused(part[g * Shape::kSums], weight, sum);
      }
      const AttentionRow row(s, first + r);
      store_one(out + row.g * s.out_head + row.t * s.out_row + c * s.out_column, sum * last_factor(total));
    }
    sync();
  }
}

}  // namespace ark::loop
