// Products of many float8 rows with float8 weights: out[r, c] = (sum over d of a[r, d] b[d, c]) * columns[c] * rows[r]
// (+ bias[r, c]), rounded once.
//
// Tiles pass through the same ring as those of half types (tile_ring.cuh), and warp groups multiply them by sm_90a's
// instructions for float8: a line of 128 bytes is a depth of 128. These instructions add with fewer bits than float32
// has. Unless kFast allows that for the whole depth, each line's sums are added as float32. Operands that are not
// aligned are multiplied element by element, and so is everything on other architectures, to which no plan comes with
// such a product.
#pragma once

#include "cuda/loop/matmul.cuh"

namespace ark::loop {

template <class Scales, class Out>
ARK_LOOP void scaled_one_by_one(const Product& s, const e4m3* a, const e4m3* b, Out* out, const Scales* by, int r0,
                                int r1, int c0, int c1) {
  const int64_t columns = c1 - c0;
  for_elements((r1 - r0) * columns, [&](int64_t i) {
    const int r = r0 + static_cast<int>(i / columns), c = c0 + static_cast<int>(i % columns);
    float sum = 0;
    ARK_ROLLED for (int64_t d = 0; d < s.depth; ++d) sum =
        fused(load_one(a + r * s.a_row + d), load_one(b + d + c * s.b_column), sum);
    const auto* const scales = RowAndColumnScales<true>::scales_of(by);
    finish_one(s, out + r * s.out_row, by, r, c, sum * scales->of_column(c) * scales->of_row(r));
  });
}

// kRows, kColumns: the shape of a tile, which the plan has chosen. By: Scaled, or Finished of it.
template <int64_t, Product kShape, int kRows, int kColumns, bool kFast, class Out, class By>
ARK_LOOP void scaled_product(const e4m3* a, const e4m3* b, Out* out, const By* by, int64_t r0, int64_t r1, int64_t c0,
                             int64_t c1) {
  constexpr Product s = kShape;
  static_assert(s.a_depth == 1 && s.b_depth == 1);
  const int r_end = static_cast<int>(r1), c_end = static_cast<int>(c1);
  if constexpr (kHasGroupMultiply && s.a_aligned && s.b_aligned) {
    using Tile = GroupTile<e4m3, kRows, kColumns, false, false, !kFast>;
    using ACopy = ChunkCopy<kRows, false, e4m3, EvenRows>;
    using BCopy = ChunkCopy<kColumns, false, e4m3, EvenRows>;
    const Side<e4m3, EvenRows> a_side{a, {s.a_row, s.out_row}, 1, true}, b_side{b, {s.b_column, 0}, 1, true};
    for (int r = static_cast<int>(r0); r < r_end; r += kRows) {
      for (int c = static_cast<int>(c0); c < c_end; c += kColumns) {
        const int r_past = least(r + kRows, r_end), c_past = least(c + kColumns, c_end);
        Tile tile;
        ring_product<ACopy, BCopy, kRows, kColumns>(tile, s, a_side, b_side, out, by, r, r_past, c, c_past);
        tile.finish(s, a_side.at, out, by, r, r_past, c, c_past, stored_in_pairs<EvenRows>(s, out, c));
      }
    }
  } else {
    scaled_one_by_one(s, a, b, out, by, static_cast<int>(r0), r_end, static_cast<int>(c0), c_end);
  }
}

}  // namespace ark::loop
