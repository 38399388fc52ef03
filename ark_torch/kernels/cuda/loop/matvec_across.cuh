// Few rows times weights [k, n]: lanes are along contiguous columns.
//
// Four lanes load 64 contiguous bytes of a row of b, eight rows at once; the block's 16 warps take eight rows of every
// 128. Columns start at a multiple of 16 bytes even if the tile does not; columns of other tiles are dropped.
#pragma once

#include "cuda/loop/lanes.cuh"

namespace ark::loop {

inline constexpr int kAcrossRows = 8, kAcrossChunks = 4;  // of b, per warp at once

// 16 bytes of a row of b; kFast: aligned.
template <bool kFast, class Loads, class B>
ARK_LOOP Chunk load_row(const Product& s, const Loads& loads, const B* row, int c, int c1, bool wanted) {
  if constexpr (kFast) {
    return loads(row + c, wanted);
  } else {
    Chunk chunk{};
    ARK_UNROLL for (int i = 0; i < kPerChunk<B>; ++i) if (wanted && c + i < c1) set_element(chunk, i, row[c + i]);
    return chunk;
  }
}

// As dot_parts; a slice is one warp's rows of b.
template <int Rows, bool kFast, Cache kCache, class At, class A, class B>
ARK_LOOP void across_parts(const Product& s, const At& at, const A* a, const B* b, int r0, int rows, int first_segment,
                           int segments, int c, int c1, int batches, Parts parts) {
  constexpr int kPer = kPerChunk<B>, kTogether = !kFast ? 1 : Rows <= 2 ? 8 : 4;
  constexpr int kStep = kWarps * kAcrossRows;
  const int turns = static_cast<int>(in_wholes(s.depth, kStep * kTogether));
  const ChunkLoads<kCache> loads;
  const int my_row = lane() / kAcrossChunks, my_chunk = lane() % kAcrossChunks;

  // What to load next: rows of b at stride kStep, for a batch of columns.
  struct {
    int turn = 0, batch = 0, segment = 0;
    int d, column, row;
    const B* from;
  } next;
  auto place = [&] {
    next.d = next.segment < segments ? next.turn * (kStep * kTogether) + warp() * kAcrossRows + my_row
                                     : static_cast<int>(s.depth);
    next.column = c + (next.batch * kAcrossChunks + my_chunk) * kPer;
    const int segment = first_segment + (next.segment < segments ? next.segment : 0);
    next.from = b + at.b(segment) + next.d * s.b_depth;
    next.row = r0 + segment * Rows;
  };
  auto advance = [&] {
    if (++next.turn == turns) {
      next.turn = 0;
      if (++next.batch == batches) {
        next.batch = 0;
        ++next.segment;
      }
    }
    place();
  };
  Chunk ring[kTogether];
  float x[Rows][kTogether];
  auto load = [&](int u) {
    const bool wanted = next.d + u * kStep < s.depth;
    ring[u] = load_row<kFast>(s, loads, next.from + u * kStep * s.b_depth, next.column, c1, wanted && next.column < c1);
    ARK_UNROLL for (int r = 0; r < Rows; ++r) x[r][u] =
        wanted && r < rows ? load_one(a + at.a(next.row + r) + (next.d + u * kStep) * s.a_depth) : 0.0f;
  };
  place();
  ARK_UNROLL for (int u = 0; u < kTogether; ++u) load(u);
  for (int segment = 0; segment < segments; ++segment)
    for (int batch = 0; batch < batches; ++batch) {
      float sums[Rows][kPer] = {};
      for (int turn = 0; turn < turns; ++turn) {
        advance();
        ARK_UNROLL for (int u = 0; u < kTogether; ++u) {
          ARK_UNROLL for (int i = 0; i < kPer; ++i) {
            const float w = chunk_element<B>(ring[u], i);
            ARK_UNROLL for (int r = 0; r < Rows; ++r) sums[r][i] = fused(x[r][u], w, sums[r][i]);
          }
          load(u);
        }
      }
      ARK_UNROLL for (int r = 0; r < Rows; ++r) {
        const float sum = fold_lanes<16, kAcrossChunks>(sums[r]);
        constexpr int kLanes = kAcrossRows / kPer;  // lanes that have the same column
        if (my_row % kLanes == 0)
          *parts.at(segment * Rows + r, warp(), (batch * kAcrossChunks + my_chunk) * kPer + my_row / kLanes) = sum;
      }
    }
}

template <int Rows, bool kFast, Cache kCache, class At, class A, class B, class Out, class Bias>
ARK_LOOP void across_columns(const Product& s, const At& at, const A* a, const B* b, Out* out, const Bias* bias, int r0,
                             int rows, int segments, int c0, int c1) {
  constexpr int kPer = kPerChunk<B>;
  in_slices<Rows>(
      rows, segments, c0 / kPer * kPer, c1, kWarps, kAcrossChunks * kPer,
      [&](int first, int count, int c, int batches, Parts parts) {
        across_parts<Rows, kFast, kCache>(s, at, a, b, r0, rows, first, count, c, c1, batches, parts);
      },
      [&](int line, int c, float sum) {
        if (c >= c0) finish_one(s, out + at.out(r0 + line), bias, r0 + line, c, sum);
      });
}

}  // namespace ark::loop
