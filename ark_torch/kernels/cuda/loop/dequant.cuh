// Products with coded weights of a tile: out[r, c] = sum over d of a[r, d] w[d, c] (+ bias[r, c]), where w is decoded
// in registers, so that what streams from memory is codes: int8, float8 (e4m3) or two numbers of 4 bits a byte.
//
// Halves by tensor cores (dequant_tensor.cuh); float32 rows, and what is not aligned or grouped as those need it,
// number by number. Which of the two computes an element depends on shapes, strides, alignment and types alone.
#pragma once

#include "cuda/loop/dequant_tensor.cuh"

namespace ark::loop {

// A column for each warp, a number for each lane.
template <int Rows, Product kShape, Codes q, class A, class B, class Scale, class Zero, class Finish>
ARK_LOOP void dequant_plain(const A* a, const CodedColumns<q, B, Scale, Zero>& columns, int r0, int rows, int c0,
                            Finish finish) {
  constexpr Product s = kShape;
  for (int c = c0 + warp(); c < columns.c1; c += kWarps) {
    const B* const codes = columns.from(c);
    float sums[Rows] = {};
    ARK_ROLLED for (int d = lane(); d < s.depth; d += 32) {
      const int g = d / q.group;
      float w = Decode<q, B, f16>::one(codes, d);
      if constexpr (!q.zero_after) w -= columns.zero(g, c);
      w *= columns.scale(g, c);
      if constexpr (q.zero_after) w += columns.zero(g, c);
      ARK_UNROLL for (int r = 0; r < Rows; ++r) if (r < rows) sums[r] =
          fused(load_one(a + (r0 + r) * s.a_row + d * s.a_depth), w, sums[r]);
    }
    ARK_UNROLL for (int r = 0; r < Rows; ++r) {
      const float one[1] = {sums[r]};
      const float sum = fold_lanes<16, 1>(one);
      if (lane() == 0 && r < rows) finish(r, c, sum);
    }
  }
}

// Rows [r0, r1) and columns [c0, c1). MostRows bounds r1 - r0.
template <int64_t MostRows, Product kShape, Codes q, class A, class B, class Scale, class Zero, class Out, class Bias>
ARK_LOOP void dequant_product(const A* a, const B* b, const Scale* scales, const Zero* zeros, Out* out,
                              const Bias* bias, int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
  constexpr Product s = kShape;
  constexpr int kRows = least<int64_t>(MostRows, kTensorRows);
  const CodedColumns<q, B, Scale, Zero> columns{b, s.b_column, scales, zeros, static_cast<int>(c1)};
  ARK_ROLLED for (int first = static_cast<int>(r0); first < r1; first += kRows) {
    const int rows = least(kRows, static_cast<int>(r1) - first);
    if constexpr (kIsHalf<A> && kDequantsByTensor<s, q>) {
      constexpr DepthSplit split = split_k(s.depth, kDequantSlice);
      in_slices<kRows>(
          rows, 1, static_cast<int>(c0), static_cast<int>(c1), split.slices, split.groups * 16,
          [&](int, int, int c, int batches, Parts parts) {
            dequant_parts<kRows, s, q>(a, columns, first, rows, c, batches, parts);
          },
          [&](int line, int c, float sum) {
            if constexpr (kScaledLast<s, q, Zero>) sum *= columns.scale(0, c);
            finish_one(s, out + (first + line) * s.out_row, bias, first + line, c, sum);
          });
    } else {
      dequant_plain<kRows, s, q>(a, columns, first, rows, static_cast<int>(c0), [&](int line, int c, float sum) {
        finish_one(s, out + (first + line) * s.out_row, bias, first + line, c, sum);
      });
    }
  }
}

}  // namespace ark::loop
