// Few rows times columns whose depth is adjacent: bound by the memory that b comes from.
//
// A thread keeps its part of a in registers, the same depth for all columns, and lets columns pass: eight loads of 16
// bytes (four where rows need the registers) are under way at any time, the next column's the moment that one has been
// used: 64 KB a block. What the lanes of a warp have is added up eight columns at once, by nine shuffles instead of
// forty; slices meet in shared memory.
#pragma once

#include "cuda/loop/lanes.cuh"

namespace ark::loop {

// 16 bytes of a column of b; kFast: they are adjacent and aligned.
template <bool kFast, class B>
ARK_LOOP Chunk load_column(const Product& s, const ReadOnce& read_once, const B* from, int d, bool wanted) {
  if constexpr (kFast) {
    return read_once(from, wanted);
  } else {
    Chunk chunk{};
    ARK_UNROLL for (int i = 0; i < kPerChunk<B>; ++i) if (wanted && d + i < s.depth)
        set_element(chunk, i, from[i * s.b_depth]);
    return chunk;
  }
}

// Adds 16 bytes of column u to its sums with each row.
template <class B, int Rows, int kPer, int kTogether>
ARK_LOOP void add_chunk(const float (&x)[Rows][kPer], const Chunk& chunk, int u, float (&sums)[Rows][kTogether]) {
  float w[kPer];
  ARK_UNROLL for (int i = 0; i < kPer; ++i) w[i] = chunk_element<B>(chunk, i);
  ARK_UNROLL for (int r = 0; r < Rows; ++r) ARK_UNROLL for (int i = 0; i < kPer; ++i) sums[r][u] =
      fused(x[r][i], w[i], sums[r][u]);
}

template <class B>
ARK_LOOP int held_columns(const Product& s, const Held& held) {
  return held.bytes / static_cast<int>(s.depth * sizeof(B));
}

// That a warp takes together: as many as there are registers for.
template <int Rows, bool kFast>
inline constexpr int kDotColumns = !kFast      ? 1
                                   : Rows <= 2 ? 8
                                               : 4;

// Batches of columns from c on of `segments` products, each of `Rows` rows of its own (from row r0 on; `rows` of them
// are meant) and a b of its own, as sums of slices: parts[segment][row][slice][column]. `columns` says where a column
// lies, and how many are left from it on of those that lie evenly: OneRun, or Runs of products.cuh. Columns before
// number `loaded` are held in shared memory, and added up while the first of the others are on their way.
template <int Rows, bool kFast, int kTogether, class At, class A, class Columns>
ARK_LOOP void dot_parts(const Product& s, const At& at, const A* a, const Columns& columns, int r0, int rows,
                        int first_segment, int segments, int c, int loaded, const char* held, int batches,
                        Parts parts) {
  using B = typename Columns::Element;
  constexpr int kPer = kPerChunk<B>;
  const DepthSplit split = split_depth(s.depth, 32 * kPer);
  const int slice = warp() % split.slices, group = warp() / split.slices;
  if (group >= split.groups) return;
  const ReadOnce read_once;
  const int step = split.slices * 32 * kPer;
  const int my_depth = (slice * 32 + lane()) * kPer;
  const int at_once = split.groups * kTogether, numbers = batches * at_once;  // numbers: of columns, some past the end
  const int first = least(loaded, c + numbers);
  const int held_batches = static_cast<int>(in_wholes(first - c, at_once));
  const int loads = static_cast<int>(in_wholes(c + numbers - first, at_once));  // batches

  // The next batch of columns to be loaded.
  struct {
    int batch = 0, pass = 0, segment = 0;
    int left;  // of its columns
    int d;
    const B* from = nullptr;
  } next;
  auto place = [&] {
    const int column = first + (next.batch * split.groups + group) * kTogether;
    next.d = my_depth + next.pass * step;
    next.left = next.segment < segments && next.d < s.depth ? columns.left(column) : 0;
    if (next.left > 0) next.from = columns.from(column) + at.b(first_segment + next.segment) + next.d * s.b_depth;
  };
  auto advance = [&] {
    if (++next.batch == loads) {
      next.batch = 0;
      if (++next.pass == split.passes) {
        next.pass = 0;
        ++next.segment;
      }
    }
    place();
  };
  auto load = [&](int u) {
    return load_column<kFast>(s, read_once, next.from + u * s.b_column, next.d, u < next.left);
  };

  auto keep = [&](float sum, int column, int end, int segment, int r, int pass) {
    constexpr int kLanes = 32 / kTogether;  // that have the same column
    const int mine = column + lane() / kLanes;
    if (lane() % kLanes != 0 || mine >= end) return;
    float* const to = parts.at(segment * Rows + r, slice, mine - c);
    *to = pass == 0 ? sum : *to + sum;
  };

  Chunk ring[kTogether];
  place();
  ARK_UNROLL for (int u = 0; u < kTogether; ++u) ring[u] = load(u);
  for (int segment = 0; segment < segments; ++segment)
    for (int pass = 0; pass < split.passes; ++pass) {
      float x[Rows][kPer];
      const int d = my_depth + pass * step;
      ARK_UNROLL for (int r = 0; r < Rows; ++r) load_run(
          s, a + at.a(r0 + (first_segment + segment) * Rows + (r < rows ? r : 0)), d, r < rows && d < s.depth, x[r]);
      for (int batch = 0; batch < held_batches || batch < loads; ++batch) {
        const int ahead = (batch * split.groups + group) * kTogether;
        if (kFast && c + ahead < first) {
          const int left = d < s.depth ? least(columns.left(c + ahead), first - c - ahead) : 0;
          const B* const from = reinterpret_cast<const B*>(held) + columns.packed(c + ahead) * s.depth + d;
          __builtin_assume(__isShared(from));
          float sums[Rows][kTogether] = {};
          ARK_UNROLL for (int u = 0; u < kTogether; ++u) {
            Chunk one{};
            if (u < left) one = *reinterpret_cast<const Chunk*>(from + u * s.depth);
            add_chunk<B>(x, one, u, sums);
          }
          ARK_UNROLL for (int r = 0; r < Rows; ++r)
              keep(fold_lanes<16, 1>(sums[r]), c + ahead, first, segment, r, pass);
        }
        if (batch < loads) {
          advance();
          float sums[Rows][kTogether] = {};
          ARK_UNROLL for (int u = 0; u < kTogether; ++u) {
            const Chunk one = ring[u];
            ring[u] = load(u);
            add_chunk<B>(x, one, u, sums);
          }
          ARK_UNROLL for (int r = 0; r < Rows; ++r)
              keep(fold_lanes<16, 1>(sums[r]), first + ahead, c + numbers, segment, r, pass);
        }
      }
    }
}

template <int Rows, bool kFast, class At, class A, class B, class Out, class Bias>
ARK_LOOP void dot_columns(const Product& s, const At& at, const A* a, const B* b, Out* out, const Bias* bias, int r0,
                          int rows, int segments, int c0, int c1, Held held) {
  constexpr int kTogether = kDotColumns<Rows, kFast>;
  const DepthSplit split = split_depth(s.depth, 32 * kPerChunk<B>);
  in_slices<Rows>(
      rows, segments, c0, c0, c1, split.slices, split.groups * kTogether,
      [&](int first, int count, int c, int batches, Parts parts) {
        const OneRun<B> run{b, s.b_column, c0, c1};
        const int loaded = kFast && c == c0 ? run.past(held_columns<B>(s, held)) : c;
        dot_parts<Rows, kFast, kTogether>(s, at, a, run, r0, rows, first, count, c, loaded, held.at, batches, parts);
      },
      [&](int line, int c, float sum) { finish_one(s, out + at.out(r0 + line), bias, r0 + line, c, sum); });
}

}  // namespace ark::loop
