// Few rows times weights [k, n]: lanes lie along adjacent columns.
//
// Four lanes load 64 adjacent bytes of a row of b, eight rows at once; the block's 16 warps take eight rows of every
// 128. Columns start at a multiple of 16 bytes, even where the tile does not: what belongs to others is left away.
#pragma once

#include "cuda/loop/lanes.cuh"

namespace ark::loop {

inline constexpr int kAcrossRows = 8, kAcrossChunks = 4;  // of b, a warp at once

// 16 bytes of a row of b; kFast: aligned.
template <bool kFast, class B>
ARK_LOOP Chunk load_row(const Product& s, const ReadOnce& read_once, const B* row, int64_t c, int64_t c1, bool wanted) {
  if constexpr (kFast) {
    return read_once(row + c, wanted);
  } else {
    Chunk chunk{};
    ARK_UNROLL for (int i = 0; i < kPerChunk<B>; ++i) if (wanted && c + i < c1) set_element(chunk, i, row[c + i]);
    return chunk;
  }
}

// Sums over this warp's part of the depth, of the columns from c on: one for each lane that `fold_lanes` leaves one.
template <int Rows, bool kFast, class At, class A, class B>
ARK_LOOP void across_parts(const Product& s, const At& at, const A* a, const B* b, int64_t r0, int rows, int64_t c,
                           int64_t c1, float* parts, int width) {
  constexpr int kPer = kPerChunk<B>, kTogether = !kFast ? 1 : Rows <= 2 ? 8 : 4;
  constexpr int kStep = kWarps * kAcrossRows;
  const ReadOnce read_once;
  const int64_t my_column = c + lane() % kAcrossChunks * kPer;
  const int my_row = lane() / kAcrossChunks;
  Chunk ring[kTogether];
  float x[Rows][kTogether];
  auto load = [&](int u, int64_t d) {
    const bool wanted = d < s.depth;
    ring[u] = load_row<kFast>(s, read_once, b + d * s.b_depth, my_column, c1, wanted && my_column < c1);
    ARK_UNROLL for (int r = 0; r < Rows; ++r) x[r][u] =
        wanted && r < rows ? load_one(a + at.a(r0 + r) + d * s.a_depth) : 0.0f;
  };
  float sums[Rows][kPer] = {};
  ARK_UNROLL for (int u = 0; u < kTogether; ++u) load(u, warp() * kAcrossRows + my_row + u * kStep);
  for (int64_t d = warp() * kAcrossRows; d < s.depth; d += kTogether * kStep)
    ARK_UNROLL for (int u = 0; u < kTogether; ++u) {
      ARK_UNROLL for (int i = 0; i < kPer; ++i) {
        const float w = chunk_element<B>(ring[u], i);
        ARK_UNROLL for (int r = 0; r < Rows; ++r) sums[r][i] = fused(x[r][u], w, sums[r][i]);
      }
      load(u, d + my_row + (kTogether + u) * kStep);
    }
  ARK_UNROLL for (int r = 0; r < Rows; ++r) {
    const float sum = fold_lanes<16, kAcrossChunks>(sums[r]);
    constexpr int kLanes = kAcrossRows / kPer;  // that have the same column
    if (my_row % kLanes == 0)
      parts[(warp() * Rows + r) * width + lane() % kAcrossChunks * kPer + my_row / kLanes] = sum;
  }
}

template <int Rows, bool kFast, class At, class A, class B, class Out, class Bias>
ARK_LOOP void across_columns(const Product& s, const At& at, const A* a, const B* b, Out* out, const Bias* bias,
                             int64_t r0, int rows, int64_t c0, int64_t c1) {
  constexpr int kPer = kPerChunk<B>, kColumns = kAcrossChunks * kPer;
  constexpr int kMost = kWorkspaceBytes / 4 / (kWarps * Rows) / kColumns * kColumns;
  float* const parts = reinterpret_cast<float*>(workspace());
  for (int64_t c = c0 / kPer * kPer; c < c1; c += kMost) {
    const int64_t end = least(c1, c + kMost);
    sync();
    for (int64_t from = c; from < end; from += kColumns)
      across_parts<Rows, kFast>(s, at, a, b, r0, rows, from, c1, parts + (from - c), kMost);
    sync();
    for (int r = 0; r < rows; ++r)
      for (int64_t i = thread(); i < end - c; i += kThreads) {
        if (c + i < c0) continue;
        const float* const part = parts + r * kMost + i;
        float sum = part[0];
        ARK_UNROLL for (int w = 1; w < kWarps; ++w) sum += part[w * Rows * kMost];
        finish_one(s, out + at.out(r0 + r), bias, r0 + r, c + i, sum);
      }
  }
}

}  // namespace ark::loop
