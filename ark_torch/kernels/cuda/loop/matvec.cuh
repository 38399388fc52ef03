// Few rows times columns that are contiguous along the depth: bound by the bandwidth for b.
//
// A thread keeps its part of a in registers, the same depths for all columns, while columns pass. It has eight 16-byte
// loads in flight (four if rows need the registers), and loads the next column as soon as one has been used: 64 KB per
// block. The lanes of a warp add up eight columns at once, with nine shuffles instead of forty; slices are combined in
// shared memory.
#pragma once

#include "cuda/loop/lanes.cuh"

namespace ark::loop {

// 16 bytes of a column of b; kFast: contiguous and aligned. After the end of the depth it reads zeros, since a's zeros
// times an infinity would be NaN (`whole`: d never gets there). If not wanted, `chunk` keeps another column's data,
// whose sum is never read. Zeroing it would make ptxas place a zero in a word of the last load, and so wait for that
// load in every round.
template <bool kFast, class Loads, class B>
ARK_LOOP void load_column(Chunk& chunk, const Product& s, const Loads& loads, const B* from, int d, bool whole,
                          bool wanted) {
  if constexpr (kFast) {
    if (!whole && d >= s.depth) chunk = {};
    loads.load(chunk, from, wanted);
  } else {
    chunk = {};
    ARK_UNROLL for (int i = 0; i < kPerChunk<B>; ++i) if (wanted && d + i < s.depth)
        set_element(chunk, i, from[i * s.b_depth]);
  }
}

// Columns that a warp takes together: as many as registers allow with the rows.
template <int Rows, bool kFast, class B>
inline constexpr int kDotColumns = !kFast                     ? 1
                                   : Rows * kPerChunk<B> <= 8 ? 8
                                                              : 4;

// Computes sums of slices, parts[segment][row][slice][column], for batches of columns from c on. Each of `segments`
// products has `Rows` rows (from r0 on; `rows` of them are used) and a b of its own. `columns` (OneRun, or Runs of
// products.cuh) returns the address of a column and how many evenly spaced ones follow.
template <int Rows, bool kFast, int kTogether, Cache kCache, class At, class AAt, class Columns>
ARK_LOOP void dot_parts(const Product& s, const At& at, AAt a, const Columns& columns, int r0, int rows,
                        int first_segment, int segments, int c, int batches, Parts parts) {
  using B = typename Columns::Element;
  constexpr int kPer = kPerChunk<B>;
  // The sums of all rows are folded at once, in fewer steps than row by row; their number must be a power of two.
  constexpr int kRowsFolded = Rows <= 1 ? 1 : Rows <= 2 ? 2 : Rows <= 4 ? 4 : 8;
  const DepthSplit split = split_k(s.depth, 32 * kPer);
  const int self = thread_anew(), lane = self % 32;  // re-read: no register keeps anything of it across runs
  const int slice = self / 32 % split.slices, group = self / 32 / split.slices;
  if (group >= split.groups) return;
  const ChunkLoads<kCache> loads;
  const int step = split.slices * 32 * kPer;
  const int my_depth = (slice * 32 + lane) * kPer;
  const bool whole = split.passes * step == s.depth;

  // The next batch of columns to load.
  struct {
    int batch = 0, pass = 0, segment = 0;
    int left;  // remaining columns
    int d;
    const B* from = nullptr;
  } next;
  auto place = [&] {
    const int column = c + (next.batch * split.groups + group) * kTogether;
    next.d = my_depth + next.pass * step;
    next.left = next.segment < segments && next.d < s.depth ? columns.left(column) : 0;
    if (next.left > 0) next.from = columns.from(column) + at.b(first_segment + next.segment) + next.d * s.b_depth;
  };
  auto advance = [&] {
    if (++next.batch == batches) {
      next.batch = 0;
      if (++next.pass == split.passes) {
        next.pass = 0;
        ++next.segment;
      }
    }
    place();
  };
  Chunk ring[kTogether] = {};
  auto load = [&](int u) {
    load_column<kFast>(ring[u], s, loads, next.from + u * s.b_column, next.d, whole, u < next.left);
  };
  place();
  ARK_UNROLL for (int u = 0; u < kTogether; ++u) load(u);
  for (int segment = 0; segment < segments; ++segment)
    for (int pass = 0; pass < split.passes; ++pass) {
      float x[Rows][kPer];
      const int d = my_depth + pass * step;
      const auto* const from = now(a);
      ARK_UNROLL for (int r = 0; r < Rows; ++r) load_run(
          s, from + at.a(r0 + (first_segment + segment) * Rows + (r < rows ? r : 0)), d, r < rows && d < s.depth, x[r]);
      for (int batch = 0; batch < batches; ++batch) {
        advance();
        float sums[kRowsFolded * kTogether] = {};
        ARK_UNROLL for (int u = 0; u < kTogether; ++u) {
          float w[kPer];
          ARK_UNROLL for (int i = 0; i < kPer; ++i) w[i] = chunk_element<B>(ring[u], i);
          ARK_UNROLL for (int r = 0; r < Rows; ++r) ARK_UNROLL for (int i = 0; i < kPer; ++i) sums[r * kTogether + u] =
              fused(x[r][i], w[i], sums[r * kTogether + u]);
          load(u);  // after the last use; otherwise the load would go to other registers and be copied
        }
        const float sum = fold_lanes<16, 1>(sums);
        constexpr int kLanes = 32 / (kRowsFolded * kTogether);  // lanes that have the same sum
        const int row = lane / kLanes / kTogether, column = lane / kLanes % kTogether;
        float* const to = parts.at(segment * Rows + row, slice, (batch * split.groups + group) * kTogether + column);
        if (lane % kLanes == 0 && row < Rows) *to = pass == 0 ? sum : *to + sum;
      }
    }
}

template <int Rows, bool kFast, Cache kCache, class At, class A, class B, class Out, class Bias>
ARK_LOOP void dot_columns(const Product& s, const At& at, const A* a, const B* b, Out* out, const Bias* bias, int r0,
                          int rows, int segments, int c0, int c1) {
  constexpr int kTogether = kDotColumns<Rows, kFast, B>;
  const DepthSplit split = split_k(s.depth, 32 * kPerChunk<B>);
  in_slices<Rows>(
      rows, segments, c0, c1, split.slices, split.groups * kTogether,
      [&](int first, int count, int c, int batches, Parts parts) {
        dot_parts<Rows, kFast, kTogether, kCache>(s, at, a, OneRun<B>{b, s.b_column, c1}, r0, rows, first, count, c,
                                                  batches, parts);
      },
      [&](int line, int c, float sum) { finish_one(s, out + at.out(r0 + line), bias, r0 + line, c, sum); });
}

}  // namespace ark::loop
