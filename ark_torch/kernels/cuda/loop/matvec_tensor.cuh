// Up to 16 half-type rows times columns that are contiguous along the depth. Bound by bandwidth like a single row, but
// with more multiplications than threads have time for, so on tensor cores.
//
// A warp keeps 16 rows x 128 depths of a in registers while columns pass, sixteen at a time: eight 16-byte loads per
// thread are in flight. The 32 consecutive depths of a column that four lanes load serve as the operands of two
// products in the order in which they arrive: any assignment to depths works if a's rows are permuted in the same way.
#pragma once

#include "cuda/loop/lanes.cuh"

namespace ark::loop {

inline constexpr int kTensorRows = 16;
// Octets of columns: as many as registers allow with the addresses of rows.
template <class At>
inline constexpr int kTensorOctets = At::kEven ? 2 : 1;
inline constexpr int kTensorPart = 32, kTensorParts = 4;  // of depth

// 16 bytes of a row of a, whose depth is a multiple of that; zeros outside the matrix.
template <class T>
ARK_LOOP Chunk load_row_chunk(const Product& s, const T* row, int d, bool wanted) {
  Chunk chunk{};
  const T* const from = row + d * s.a_depth;
  if (!wanted || d >= s.depth) return chunk;
  if (s.a_depth == 1 && s.a_aligned)
    chunk = *reinterpret_cast<const Chunk*>(from);
  else
    ARK_UNROLL for (int i = 0; i < kPerChunk<T>; ++i) set_element(chunk, i, from[i * s.a_depth]);
  return chunk;
}

// As dot_parts.
template <int Rows, Cache kCache, class At, class T, class Columns>
ARK_LOOP void tensor_parts(const Product& s, const At& at, const T* a, const Columns& columns, int r0, int rows, int c,
                           int batches, Parts parts) {
  constexpr int kOctets = kTensorOctets<At>, kTogether = kOctets * 8, kSlice = kTensorParts * kTensorPart;
  const DepthSplit split = split_k(s.depth, kSlice);
  const int self = thread_anew(), lane = self % 32;  // re-read: no register keeps anything of it across runs
  const int slice = self / 32 % split.slices, group = self / 32 / split.slices;
  if (group >= split.groups) return;
  const ChunkLoads<kCache> loads;
  const int my_line = lane / 4;  // row of a, column of b
  const int my_depth = slice * kSlice + lane % 4 * kPerChunk<T>;
  const int step = split.slices * kSlice;
  const bool whole = split.passes * step == s.depth;

  // The next batch of columns to load. An octet of columns belongs to one product.
  struct {
    int batch = 0, pass = 0, left[kOctets];
    int d;
    const T* from[kOctets];
  } next;
  auto place = [&] {
    next.d = my_depth + next.pass * step;
    ARK_UNROLL for (int o = 0; o < kOctets; ++o) {
      const int column = c + (next.batch * split.groups + group) * kTogether + o * 8;
      const bool first = Columns::kOne && o > 0;  // octets of one product are consecutive
      next.left[o] = first ? next.left[0] - o * 8 : next.pass < split.passes ? columns.left(column) - my_line : 0;
      next.from[o] = first ? next.from[0] + o * 8 * s.b_column : columns.from(column) + my_line * s.b_column + next.d;
    }
  };
  Chunk ring[kOctets][kTensorParts] = {};
  auto load = [&](int octet, int part) {
    const bool there = whole || next.d + part * kTensorPart < s.depth;
    if (!there) ring[octet][part] = {};
    loads.load(ring[octet][part], next.from[octet] + part * kTensorPart, 0 < next.left[octet] && there);
  };
  place();
  ARK_UNROLL for (int o = 0; o < kOctets; ++o) ARK_UNROLL for (int q = 0; q < kTensorParts; ++q) load(o, q);
  ARK_ROLLED for (int pass = 0; pass < split.passes; ++pass) {
    Chunk x[kTensorParts][2];
    ARK_UNROLL for (int q = 0; q < kTensorParts; ++q) ARK_UNROLL for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + my_line;
      x[q][half] = load_row_chunk(s, a + at.a(r0 + (row < rows ? row : 0)), my_depth + pass * step + q * kTensorPart,
                                  half * 8 < Rows && row < rows);
    }
    ARK_ROLLED for (int batch = 0; batch < batches; ++batch) {
      if (++next.batch == batches) {
        next.batch = 0;
        ++next.pass;
      }
      place();
      ARK_UNROLL for (int o = 0; o < kOctets; ++o) {
        float sums[4] = {};
        ARK_UNROLL for (int q = 0; q < kTensorParts; ++q) {
          const Chunk& w = ring[o][q];
          ARK_UNROLL for (int i = 0; i < 4; i += 2) {
            const uint32 lines[4] = {x[q][0].words[i], x[q][1].words[i], x[q][0].words[i + 1], x[q][1].words[i + 1]};
            multiply_add<T>(sums, lines, w.words[i], w.words[i + 1]);
          }
          // Load after the last use, which the dependency on the sum enforces; otherwise the load would go to other
          // registers and be copied.
          asm volatile("" : "+f"(sums[0]));
          load(o, q);
        }
        add_octet<Rows>(parts, lane, slice, (batch * split.groups + group) * kTogether + o * 8, pass == 0, sums);
      }
    }
  }
}

template <int Rows, Cache kCache, class At, class T, class Out, class Bias>
ARK_LOOP void tensor_columns(const Product& s, const At& at, const T* a, const T* b, Out* out, const Bias* bias, int r0,
                             int rows, int c0, int c1) {
  const DepthSplit split = split_k(s.depth, kTensorParts * kTensorPart);
  in_slices<Rows>(
      rows, 1, c0, c1, split.slices, split.groups * kTensorOctets<At> * 8,
      [&](int, int, int c, int batches, Parts parts) {
        tensor_parts<Rows, kCache>(s, at, a, OneRun<T>{b, s.b_column, c1}, r0, rows, c, batches, parts);
      },
      [&](int line, int c, float sum) { finish_one(s, out + at.out(r0 + line), bias, r0 + line, c, sum); });
}

}  // namespace ark::loop
