// Dual products of many rows: out[r, c] = finish(sum over d of a[r, d] b[d, c], the same with a second matrix), as
// silu(x @ w1) * (x @ w3). (CUTLASS calls it a dual GEMM.)
//
// A tile takes the same columns of both matrices into one stage of the ring of tile_ring.cuh, in alternate runs of
// lines (DualColumns of tile_copy.cuh), as long as gives each thread both sums of an element. Rows of a are read once
// for both matrices, and nothing but the result is stored. Each sum has the same order as in the product alone.
#pragma once

#include "cuda/loop/matmul.cuh"

namespace ark::loop {

template <class Tile, Product kShape, int kRows, int kColumns, class T, class Out, class By>
ARK_LOOP void dual_in_tiles(const Side<T, EvenRows>& a, const T* first, const T* second, bool whole, Out* out,
                            const By* by, int r0, int r1, int c0, int c1) {
  constexpr Product s = kShape;
  const Side<T, DualColumns<Tile::kRun>> b{first, {s.b_column, second - first}, s.b_depth, whole};
  tiled_product<Tile, kRows, kColumns, kRowsAcross<s, EvenRows, T>, kColumnsAcross<s, T>>(s, a, b, out, by, r0, r1, c0,
                                                                                          c1);
}

// kRows, kColumns: the shape of a tile of the result. By: Dual of product.cuh. Both matrices have the same layout.
template <Product kShape, int kRows, int kColumns, class T, class Out, class By>
ARK_LOOP void dual_product(const T* a, const T* first, const T* second, Out* out, const By* by, int64_t r0, int64_t r1,
                           int64_t c0, int64_t c1) {
  constexpr Product s = kShape;
  constexpr bool kA = kRowsAcross<s, EvenRows, T>, kB = kColumnsAcross<s, T>;
  constexpr int kFewer = least(kRows, 128), kNarrower = least(kColumns, 64);  // larger tiles are warp groups' alone
  const bool a_even = kA ? r0 % kPerChunk<T> == 0 : s.a_depth == 1;
  const bool b_even = kB ? c0 % kPerChunk<T> == 0 : s.b_depth == 1;
  const Side<T, EvenRows> a_side{a, {s.a_row, s.out_row}, s.a_depth, s.a_aligned && a_even};
  const bool whole = s.b_aligned && b_even;
  using Element = typename TensorElement<T>::Type;
  const int r = static_cast<int>(r0), r_end = static_cast<int>(r1), c = static_cast<int>(c0),
            c_end = static_cast<int>(c1);
  if constexpr (kByGroups<s, T>)
    dual_in_tiles<GroupTile<Element, kRows, 2 * kColumns, kA, kB>, s, kRows, kColumns>(a_side, first, second, whole,
                                                                                       out, by, r, r_end, c, c_end);
  else if constexpr (kByTensor<s, T>)
    dual_in_tiles<TensorTile<Element, kFewer, 2 * kNarrower, kA, kB>, s, kFewer, kNarrower>(
        a_side, first, second, whole, out, by, r, r_end, c, c_end);
  else
    dual_in_tiles<PlainTile<kFewer, 2 * kNarrower>, s, kFewer, kNarrower>(a_side, first, second, whole, out, by, r,
                                                                          r_end, c, c_end);
}

}  // namespace ark::loop
