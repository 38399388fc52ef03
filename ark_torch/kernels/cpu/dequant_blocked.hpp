// 4-bit columns stored side by side in blocks, as in PyTorch's aten._weight_int4pack_mm_for_cpu. Lanes are columns, and
// a depth's row of a block is two vectors of weights per vector of bytes. Included by dequant.hpp.
//
// Codes are looked up as integers. A group's sums are scaled once, with the zero times the sum of the row's elements:
// both vary from lane to lane. An element's sum has one order, whichever rows are computed with it.
#pragma once

namespace ark::cpu {

// Rows times a block of columns from r0 and c0 on. `a`: rows of float32 at stride a_row.
template <int Rows, Product s, Codes q, class B, class Scale, class Zero, class Out, class Bias>
ARK_INLINE void blocked_tile(const float* a, int64_t a_row, const B* codes, const Scale* scales, const Zero* zeros,
                             Out* out, const Bias* bias, int64_t r0, int64_t c0) {
  using Of = Column<q, B, NoScale, NoScale>;
  constexpr int64_t kHalf = q.block / 2, kVectors = kHalf / kLanes;
  constexpr bool kZeros = !std::is_same_v<Zero, NoScale>;
  const Nibbles<Of> number(Of(nullptr, nullptr, 0, 0));
  Floats total[Rows][2][kVectors] = {};
  for (int64_t group = 0; group * q.group < s.depth; ++group) {
    Floats part[Rows][2][kVectors] = {};
    float row[Rows] = {};
    for (int64_t d = group * q.group; d < (group + 1) * q.group; ++d) {
      ARK_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
        const Bytes raw = load_bytes(codes + d * kHalf + v * kLanes, All{});
        const Floats low = number.low(raw), high = number.high(raw);
        ARK_UNROLL for (int r = 0; r < Rows; ++r) {
          const Floats x = splat(a[r * a_row + d]);
          part[r][0][v] += x * low;
          part[r][1][v] += x * high;
        }
      }
      if constexpr (kZeros) ARK_UNROLL for (int r = 0; r < Rows; ++r) row[r] += a[r * a_row + d];
    }
    const auto of_columns = [&](const auto* from, const Codes::Strides& strides, int64_t c) ARK_BODY {
      return load_strided(from + group * strides.group + (c0 + c) * strides.column, strides.column, All{});
    };
    ARK_UNROLL for (int half = 0; half < 2; ++half) ARK_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
      const int64_t c = half * kHalf + v * kLanes;
      Floats scale = splat(1.0f), zero{};
      if constexpr (!std::is_same_v<Scale, NoScale>) scale = of_columns(scales, q.scale, c);
      if constexpr (kZeros) zero = of_columns(zeros, q.zero, c);
      ARK_UNROLL for (int r = 0; r < Rows; ++r) {
        Floats sum = part[r][half][v];
        if constexpr (kZeros && !q.zero_after) sum -= zero * splat(row[r]);
        sum *= scale;
        if constexpr (kZeros && q.zero_after) sum += zero * splat(row[r]);
        total[r][half][v] += sum;
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int64_t c = 0; c < q.block; ++c)
      finish_one(s, out, bias, r0 + r, c0 + c, total[r][c / kHalf][c % kHalf / kLanes][c % kLanes]);
}

// Columns [c0, c1), whole blocks, of a few packed rows.
template <int Rows, Product s, Codes q, class B, class Scale, class Zero, class Out, class Bias>
inline void blocked_rows(const float* a, int64_t a_row, const B* b, const Scale* scales, const Zero* zeros, Out* out,
                         const Bias* bias, int64_t r0, int64_t c0, int64_t c1) {
  for (int64_t c = c0; c < c1; c += q.block)
    blocked_tile<Rows, s, q>(a, a_row, b + c / q.block * (s.depth * (q.block / 2)), scales, zeros, out, bias, r0, c);
}

}  // namespace ark::cpu
