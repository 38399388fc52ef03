// Attention of many query rows on tensor cores, as in encoders and prefill (FlashAttention; Dao et al., 2022).
//
// 64 rows at a time. Each of 16 warps has 16 rows, 64 value columns and a part of each block's positions. Blocks of
// keys and values pass through shared memory, the next one loading while one is processed. Scores, weights (rounded to
// the values' type for the second product) and sums stay in registers; finally the warps of a row combine their results
// in a fixed order. Blocks and positions to which no row attends are not copied. A mask that is the same for all rows
// (padding) is read once into shared memory; others are evaluated block by block.
#pragma once

#include "cuda/loop/attention_rows.cuh"

namespace ark::loop {

template <int Columns, int ValueColumns>
struct Tiles {
  static constexpr int kRows = 64, kWarpRows = 16, kRun = 32;  // what a warp multiplies at a time
  static constexpr int kHalves = ValueColumns <= 64 ? 1 : 2;   // of value columns: a warp has 64
  static constexpr int kGroups = 4 / kHalves;                  // of warps that share rows
  static constexpr int kBlock = kGroups * kRun;
  static constexpr int kSteps = (Columns + 15) / 16;  // of 16 columns
  static constexpr int kPairs = kHalves == 1 ? (ValueColumns + 15) / 16 : 4;
  // Rows in shared memory: chunks of 16 bytes, a multiple of eight of them.
  static constexpr int kParts = kSteps <= 4 ? 8 : 16, kValueParts = 8 * kHalves;
  static constexpr int kKeyBytes = kBlock * kParts * 16, kValueBytes = kBlock * kValueParts * 16;
  static constexpr int kStage = kKeyBytes + kValueBytes;
  static constexpr int kQueries = 2 * kStage;                    // offset of the rows' queries
  static constexpr int kLooks = kQueries + kRows * kParts * 16;  // offset of the words for looked_at()
  static constexpr int kBiases = kLooks + 2 * kWarps * 4;        // offset of a mask that is the same for all rows
  static_assert(kSteps <= 8 && kHalves * kPairs <= 8 && kBiases + kThreads * 4 <= kWorkspaceBytes);
  static_assert((kPairs * 8 + 4) * 256 * 4 <= kWorkspaceBytes);
};

// The offset of chunk c of a row, such that the same chunks of eight rows are in different banks. Chunk c + 2 n is at
// that offset ^ 32 n.
template <int kParts>
ARK_LOOP int part_at(int row, int c) {
  return (row * kParts + (c ^ (row & 7))) * 16;
}

// All threads copy rows to shared memory; rows that are not wanted, and columns from kColumns on, become zeros.
template <int kColumns, int kParts, int kCount, class T, class Row, class Wanted>
ARK_LOOP void copy_rows(char* tile, bool aligned, int64_t column, Row row_at, Wanted wanted) {
  constexpr int kUsed = (kColumns + 15) / 16 * 2;  // chunks
#pragma unroll 1
  for (int e = thread_anew(); e < kCount * kUsed; e += kThreads) {
    const int row = e / kUsed, c = e % kUsed;
    const bool there = wanted(row);
    const T* const from = row_at(there ? row : 0);
    char* const to = tile + part_at<kParts>(row, c);
    if (kColumns % 8 == 0 && aligned) {
      const bool copied = there && c * 8 < kColumns;
      copy_16(shared_address(to), copied ? from + c * 8 : from, copied ? 16 : 0);
    } else {
#pragma unroll 1
      for (int i = 0; i < 8; ++i)
        reinterpret_cast<T*>(to)[i] = there && c * 8 + i < kColumns ? from[(c * 8 + i) * column] : T{};
    }
  }
}

// A warp's state for its 16 rows: lane 4 i + j has rows i and i + 8.
template <int kPairs>
struct RunningRows {
  float greatest[2] = {-kInfinity, -kInfinity};
  float total[2] = {};
  float sums[2 * kPairs][4] = {};

  ARK_LOOP void rescale(int r, float now) {
    const float before = fast_exp(greatest[r] - base_of(now));
    greatest[r] = now;
    total[r] *= before;
    ARK_UNROLL for (int n = 0; n < 2 * kPairs; ++n) {
      sums[n][2 * r] *= before;
      sums[n][2 * r + 1] *= before;
    }
  }

  // give() leaves a warp's state in shared memory; take() merges another warp's state, of the same rows, into this one.
  ARK_LOOP void give(float* to) const {
    ARK_UNROLL for (int r = 0; r < 2; ++r) {
      to[r * 256] = greatest[r];
      to[(2 + r) * 256] = total[r];
    }
    ARK_UNROLL for (int n = 0; n < 2 * kPairs; ++n) ARK_UNROLL for (int e = 0; e < 4; ++e) to[(4 + n * 4 + e) * 256] =
        sums[n][e];
  }
  ARK_LOOP void take(const float* from) {
    ARK_UNROLL for (int r = 0; r < 2; ++r) {
      const float other = from[r * 256];
      rescale(r, fmaxf(greatest[r], other));
      const float weight = fast_exp(other - base_of(greatest[r]));
      total[r] = fused(from[(2 + r) * 256], weight, total[r]);
      ARK_UNROLL for (int n = 0; n < 2 * kPairs; ++n) ARK_UNROLL for (int e = 0; e < 2; ++e) sums[n][2 * r + e] =
          fused(from[(4 + n * 4 + 2 * r + e) * 256], weight, sums[n][2 * r + e]);
    }
  }
};

// Whether the mask is the same for all rows and short enough to keep.
template <Attention s, class M>
inline constexpr bool kOneMask =
    !kSame<M, NoMask> && s.mask_head == 0 && s.mask_row == 0 && !s.causal && s.keys <= kThreads;

// Keeps it: what is added to each position's scores, and a bit per position that is attended to.
template <Attention kShape, class M>
ARK_LOOP void keep_mask(const M* mask, float* biases, uint32* looks) {
  constexpr Attention s = kShape;
  const float bias = thread() < s.keys ? bias_of(s, mask, AttentionRow(s, 0), thread()) : -kInfinity;
  biases[thread()] = bias;
  const uint32 word = ballot(bias != -kInfinity);
  if (lane() == 0) looks[warp()] = word;
  sync();
}

// Processes one warp's rows and its run of positions in the block that starts at `block` and is in memory at `stage`.
template <class Shape, Attention kShape, class T, class M>
ARK_LOOP void attend_run(const M* mask, const char* shared, int stage, int first_row, int block, int limit,
                         RunningRows<Shape::kPairs>& rows) {
  constexpr Attention s = kShape;
  constexpr int kTiles = Shape::kRun / 8;
  const int self = thread_anew(), lane = self & 31, warp = self >> 5;
  const int i = lane >> 2, j = lane & 3, tile = lane >> 3, in_tile = lane & 7;
  const int warp_row = warp % 4 * Shape::kWarpRows, half = warp / 4 % Shape::kHalves;
  const int run = warp / (4 * Shape::kHalves) * Shape::kRun, key = block + run;
  const int all_rows = static_cast<int>(s.heads * s.queries);
  if (key >= limit || (s.causal && key >= limit_of(s, first_row + warp_row + Shape::kWarpRows))) return;
  const int query_at = Shape::kQueries + part_at<Shape::kParts>(warp_row + (tile & 1) * 8 + in_tile, tile >> 1);
  const int key_at = stage + part_at<Shape::kParts>(run + (tile >> 1) * 8 + in_tile, tile & 1);
  const int value_at =
      stage + Shape::kKeyBytes + part_at<Shape::kValueParts>(run + (tile & 1) * 8 + in_tile, half * 8 + (tile >> 1));

  float scores[kTiles][4] = {};
  _Pragma("unroll 2") for (int step = 0; step < Shape::kSteps; ++step) {
    uint32 a[4];
    load_matrices<false>(a, shared + (query_at ^ step * 32));
    ARK_UNROLL for (int n = 0; n < kTiles; n += 2) {
      uint32 b[4];
      load_matrices<false>(b, shared + (key_at ^ step * 32) + n * 8 * Shape::kParts * 16);
      multiply_add<T>(scores[n], a, b[0], b[1]);
      multiply_add<T>(scores[n + 1], a, b[2], b[3]);
    }
  }

  uint32 weights[kTiles][2];
  ARK_UNROLL for (int r = 0; r < 2; ++r) {
    const int row_number = first_row + warp_row + i + r * 8;
    const AttentionRow row(s, row_number);
    float now = rows.greatest[r];
    ARK_UNROLL for (int n = 0; n < kTiles; ++n) ARK_UNROLL for (int e = 0; e < 2; ++e) {
      const int at = key + n * 8 + 2 * j + e;
      float bias = -kInfinity;
      if constexpr (kOneMask<s, M>)
        bias = reinterpret_cast<const float*>(shared + Shape::kBiases)[at];
      else if (at < s.keys && row_number < all_rows)
        bias = bias_of(s, mask, row, at);
      scores[n][2 * r + e] = masked<M>(scores[n][2 * r + e], s.scale, bias);
      now = fmaxf(now, scores[n][2 * r + e]);
    }
    now = fmaxf(now, shuffle_xor(now, 1));
    now = fmaxf(now, shuffle_xor(now, 2));
    if (ballot(now != rows.greatest[r]) != 0) rows.rescale(r, now);
    const float base = base_of(now);
    ARK_UNROLL for (int n = 0; n < kTiles; ++n) {
      const float x = fast_exp(scores[n][2 * r] - base), y = fast_exp(scores[n][2 * r + 1] - base);
      rows.total[r] += x + y;
      weights[n][r] = pack_two(x, y, T{});
    }
  }

  ARK_UNROLL for (int n = 0; n < kTiles; n += 2) ARK_UNROLL for (int pair = 0; pair < Shape::kPairs; ++pair) {
    uint32 b[4];
    load_matrices<true>(b, shared + (value_at ^ pair * 32) + n * 8 * Shape::kValueParts * 16);
    const uint32 a[4] = {weights[n][0], weights[n][1], weights[n + 1][0], weights[n + 1][1]};
    multiply_add<T>(rows.sums[2 * pair], a, b[0], b[1]);
    multiply_add<T>(rows.sums[2 * pair + 1], a, b[2], b[3]);
  }
}

template <int Columns, int ValueColumns, Attention kShape, class T, class QAt, class KAt, class VAt, class M,
          class OutAt>
ARK_LOOP void attend_tiles(QAt q, KAt k, VAt v, const M* mask, OutAt out) {
  constexpr Attention s = kShape;
  using Out = typename Pointee<OutAt>::Type;
  const int all_rows = static_cast<int>(s.heads * s.queries);
  using Shape = Tiles<Columns, ValueColumns>;
  constexpr bool kScan = !kSame<M, NoMask>, kOne = kOneMask<s, M>;
  char* const shared = workspace();
  uint32* const looks = reinterpret_cast<uint32*>(shared + Shape::kLooks);

  for (int first = 0; first < all_rows; first += Shape::kRows) {
    const int end = all_rows - first < Shape::kRows ? all_rows : first + Shape::kRows;
    const int limit = limit_of(s, end);
    const T* const queries = now(q);
    copy_rows<Columns, Shape::kParts, Shape::kRows, T>(
        shared + Shape::kQueries, s.aligned, s.q_column,
        [&](int row) {
          const AttentionRow at(s, first + row);
          return queries + at.g * s.q_head + at.t * s.q_row;
        },
        [&](int row) { return first + row < end; });
    if constexpr (kOne) keep_mask<s>(mask, reinterpret_cast<float*>(shared + Shape::kBiases), looks);

    int turn = 0;  // alternates between two sets of words for looked_at()
    const auto next = [&](int key) -> int {
      if constexpr (kOne) {
        ARK_ROLLED for (; key < limit; key += Shape::kBlock) {
          uint32 any = 0;
          ARK_UNROLL for (int w = 0; w < Shape::kBlock / 32; ++w) any |= looks[key / 32 + w];
          if (any != 0) break;
        }
      } else if constexpr (kScan) {
        ARK_ROLLED for (; key < limit; key += Shape::kBlock) {
          turn ^= 1;
          if (scan_block<Shape::kBlock>(s, mask, first, end, key, limit, looks + turn * kWarps)) break;
        }
      }
      return key;
    };
    const auto copy = [&](int key, int slot) {
      char* const stage = shared + slot * Shape::kStage;
      const uint32* const words = looks + turn * kWarps;
      const auto wanted = [&](int row) {
        if constexpr (kOne) {
          return (looks[(key + row) / 32] >> (key + row) % 32 & 1) != 0;
        } else if constexpr (kScan) {
          return looked_at<Shape::kBlock>(words, row);
        } else {
          return key + row < limit;
        }
      };
      const T* const keys = now(k);
      copy_rows<Columns, Shape::kParts, Shape::kBlock, T>(
          stage, s.aligned, s.k_column, [&](int row) { return keys + (key + row) * s.k_row; }, wanted);
      const T* const values = now(v);
      copy_rows<ValueColumns, Shape::kValueParts, Shape::kBlock, T>(
          stage + Shape::kKeyBytes, s.aligned, s.v_column, [&](int row) { return values + (key + row) * s.v_row; },
          wanted);
    };

    RunningRows<Shape::kPairs> rows;
    int slot = 0;
    int key = next(0);
    if (key < limit) copy(key, slot);
    end_copies();
    while (key < limit) {
      const int after = next(key + Shape::kBlock);
      if (after < limit) copy(after, slot ^ 1);
      end_copies();
      wait_copies<1>();
      sync();
      attend_run<Shape, s, T>(mask, shared, slot * Shape::kStage, first, key, limit, rows);
      sync();
      key = after;
      slot ^= 1;
    }
    wait_copies<0>();
    sync();

    const int self = thread_anew(), half = self / 128 % Shape::kHalves, group = self / (128 * Shape::kHalves);
    ARK_UNROLL for (int others = Shape::kGroups / 2; others > 0; others /= 2) {
      float* const place = reinterpret_cast<float*>(shared) + self % (others * Shape::kHalves * 128);
      if (group >= others && group < 2 * others) rows.give(place);
      sync();
      if (group < others) rows.take(place);
      sync();
    }
    if (group == 0) {
      const int i = self % 32 / 4, j = self % 4;
      ARK_UNROLL for (int r = 0; r < 2; ++r) {
        rows.total[r] += shuffle_xor(rows.total[r], 1);
        rows.total[r] += shuffle_xor(rows.total[r], 2);
        const int number = first + self / 32 % 4 * Shape::kWarpRows + i + r * 8;
        if (number >= end) continue;
        const AttentionRow row(s, number);
        const float factor = last_factor(rows.total[r], s.nan_rows);
        Out* const to = now(out) + row.g * s.out_head + row.t * s.out_row;
        const bool pairs = sizeof(Out) == 2 && s.out_column == 1 && (reinterpret_cast<uint64>(to) & 3) == 0;
        ARK_UNROLL for (int n = 0; n < 2 * Shape::kPairs; ++n) {
          const int c = half * 64 + n * 8 + 2 * j;
          const float x = rows.sums[n][2 * r] * factor, y = rows.sums[n][2 * r + 1] * factor;
          if constexpr (sizeof(Out) == 2) {
            if (pairs && c + 1 < ValueColumns) {
              *reinterpret_cast<uint32*>(to + c) = pack_two(x, y, Out{});
              continue;
            }
          }
          if (c < ValueColumns) store_one(to + c * s.out_column, x);
          if (c + 1 < ValueColumns) store_one(to + (c + 1) * s.out_column, y);
        }
      }
    }
  }
  sync();
}

}  // namespace ark::loop
