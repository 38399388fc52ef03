// Products of many float8 rows with float8 weights: out[r, c] = (sum over d of a[r, d] b[d, c]) * columns[c] * rows[r]
// (+ bias[r, c]), rounded once.
//
// They are products with quantized weights (dequant.hpp) whose rows are float8, too, and become float32 as they are
// packed. The rows' scales multiply finished sums.
#pragma once

#include "cpu/dequant.hpp"

namespace ark::cpu {

// In place of a bias: a bias, and scales of rows and columns.
template <int kRowStride, int kColumnStride, class RowScale, class ColumnScale, class Bias>
struct Scaled {
  const RowScale* rows;
  const ColumnScale* columns;
  const Bias* bias;
};
template <int kRowStride, int kColumnStride, class RowScale, class ColumnScale, class Bias>
ARK_INLINE Scaled<kRowStride, kColumnStride, RowScale, ColumnScale, Bias> scaled_by(const RowScale* rows,
                                                                                    const ColumnScale* columns,
                                                                                    const Bias* bias) {
  return {rows, columns, bias};
}
template <int kRowStride, int kColumnStride, class Out, class RowScale, class ColumnScale, class Bias>
ARK_INLINE void finish_one(const Product& s, Out* out,
                           const Scaled<kRowStride, kColumnStride, RowScale, ColumnScale, Bias>* by, int64_t r,
                           int64_t c, float sum) {
  finish_one(s, out, by->bias, r, c, sum * load_one(by->rows + r * kRowStride));
}

template <int64_t MostRows, Product s, int kRowStride, int kColumnStride, class Out, class RowScale, class ColumnScale,
          class Bias>
ARK_INLINE void scaled_product(const e4m3* a, const e4m3* b, Out* out,
                               const Scaled<kRowStride, kColumnStride, RowScale, ColumnScale, Bias>* by, int64_t r0,
                               int64_t r1, int64_t c0, int64_t c1, char* scratch) {
  constexpr Codes q{.bits = 8,
                    .is_signed = false,
                    .high_first = false,
                    .zero_after = false,
                    .offset = 0,
                    .group = static_cast<int>(s.depth),
                    .scale = {0, kColumnStride},
                    .zero = {0, 0},
                    .block = 0};
  dequant_product<MostRows, s, q>(a, b, by->columns, static_cast<const NoScale*>(nullptr), out, by, r0, r1, c0, c1,
                                  scratch);
}

}  // namespace ark::cpu
