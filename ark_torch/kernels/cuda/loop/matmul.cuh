// Matrix products of a tile: out[r, c] = sum over d of a[r, d] b[d, c] (+ bias[r, c]), accumulated in float32 and
// rounded once. The kernel depends only on shapes, strides, alignment and types, and each kernel adds in one order:
// bits depend neither on the cut into tiles nor on how many rows are used.
//
// Few rows: matvec.cuh, matvec_across.cuh, matvec_tensor.cuh. Many rows: tile_ring.cuh, with tensor cores for half
// types and for float32 in TF32, plain code for other float32, and warp groups for what is aligned (in TF32 also
// contiguous along the depth) if the plan has chosen a tile shape and the architecture has them. Rare mixtures of
// types: element by element.
#pragma once

#include "cuda/loop/matvec.cuh"
#include "cuda/loop/matvec_across.cuh"
#include "cuda/loop/matvec_tensor.cuh"
#include "cuda/loop/tile_ring.cuh"

namespace ark::loop {

// Whether columns consist of whole 16-byte chunks.
template <Product s, class B>
inline constexpr bool kDotsByChunk = s.b_depth == 1 && s.depth % kPerChunk<B> == 0 && s.b_aligned;

// A thread keeps its part of this many rows in 32 registers.
template <class B>
inline constexpr int64_t kFewRows = 32 / kPerChunk<B>;

template <int MostRows, Product kShape, class At, class A, class B, class Out, class Bias>
ARK_LOOP void few_rows(const At& at, const A* a, const B* b, Out* out, const Bias* bias, int r0, int rows, int segments,
                       int c0, int c1) {
  constexpr Product s = kShape;
  if constexpr (s.b_column == 1 && s.b_depth != 1)
    across_columns<MostRows, s.b_aligned, s.b_cache>(s, at, a, b, out, bias, r0, rows, segments, c0, c1);
  else
    dot_columns<MostRows, kDotsByChunk<s, B>, s.b_cache>(s, at, a, b, out, bias, r0, rows, segments, c0, c1);
}

// Whether tensor cores multiply tiles of T, and what they take its elements as.
template <Product s, class T>
inline constexpr bool kByTensor = kIsHalf<T> || s.tf32;
template <class T>
struct TensorElement {
  using Type = T;
};
template <>
struct TensorElement<float> {
  using Type = tf32;
};

// Layouts that copies and tensor cores support: contiguous along the depth, or, for tensor cores, across it.
template <Product s, class At, class T>
inline constexpr bool kRowsAcross = s.a_depth != 1 && s.a_row == 1 && At::kEven&& kByTensor<s, T>;
template <Product s, class T>
inline constexpr bool kColumnsAcross = s.b_depth != 1 && s.b_column == 1 && kByTensor<s, T>;

// Whether warp groups multiply tiles of T. They take lines across the depth of half types alone.
template <Product s, class T>
inline constexpr bool kByGroups = kHasGroupMultiply&& s.a_aligned&& s.b_aligned&& kByTensor<s, T> &&
                                  (kIsHalf<T> || (s.a_depth == 1 && s.b_depth == 1));

// What matvec_tensor.cuh can load.
template <Product s, class T>
inline constexpr bool kDotsByTensor = kDotsByChunk<s, T>&& kIsHalf<T>;

template <Product kShape, int kRows, int kColumns, bool kGroups = false, class T, class At, class Out, class Bias>
ARK_LOOP void product_in_tiles(const Side<T, At>& a, const Side<T, EvenRows>& b, Out* out, const Bias* bias, int r0,
                               int r1, int c0, int c1) {
  constexpr Product s = kShape;
  constexpr bool kA = kRowsAcross<s, At, T>, kB = kColumnsAcross<s, T>;
  constexpr int kFewer = least(kRows, 128), kNarrower = least(kColumns, 128);  // larger tiles are warp groups' alone
  using Element = typename TensorElement<T>::Type;
  if constexpr (kGroups)
    tiled_product<GroupTile<Element, kRows, kColumns, kA, kB>, kRows, kColumns, kA, kB>(s, a, b, out, bias, r0, r1, c0,
                                                                                        c1);
  else if constexpr (kByTensor<s, T>)
    tiled_product<TensorTile<Element, kFewer, kNarrower, kA, kB>, kFewer, kNarrower, kA, kB>(s, a, b, out, bias, r0, r1,
                                                                                             c0, c1);
  else
    tiled_product<PlainTile<kFewer, kNarrower>, kFewer, kNarrower, kA, kB>(s, a, b, out, bias, r0, r1, c0, c1);
}

template <int MostRows, Product kShape, int kRows, int kColumns, class At, class T, class Out, class Bias>
ARK_LOOP void many_rows(const At& at, const T* a, const T* b, Out* out, const Bias* bias, int r0, int r1, int c0,
                        int c1) {
  constexpr Product s = kShape;
  constexpr int kPer = kPerChunk<T>;
  const bool a_even = kRowsAcross<s, At, T> ? r0 % kPer == 0 : s.a_depth == 1;
  const bool b_even = kColumnsAcross<s, T> ? c0 % kPer == 0 : s.b_depth == 1;
  const Side<T, At> a_side{a, at, s.a_depth, s.a_aligned && a_even};
  const Side<T, EvenRows> b_side{b, {s.b_column, 0}, s.b_depth, s.b_aligned && b_even};
  if constexpr (kColumns > 0) {
    product_in_tiles<s, kRows, kColumns, kByGroups<s, T>>(a_side, b_side, out, bias, r0, r1, c0, c1);
  } else if (MostRows <= 16 || r1 - r0 <= 16) {
    if (c1 - c0 <= 64)
      product_in_tiles<s, 16, 64>(a_side, b_side, out, bias, r0, r1, c0, c1);
    else
      product_in_tiles<s, 16, 128>(a_side, b_side, out, bias, r0, r1, c0, c1);
  } else if constexpr (MostRows > 16) {
    if (c1 - c0 <= 32)
      product_in_tiles<s, 128, 32>(a_side, b_side, out, bias, r0, r1, c0, c1);
    else if (MostRows <= 64 || r1 - r0 <= 64)
      product_in_tiles<s, 64, 128>(a_side, b_side, out, bias, r0, r1, c0, c1);
    else if constexpr (MostRows > 64)
      product_in_tiles<s, 128, 128>(a_side, b_side, out, bias, r0, r1, c0, c1);
  }
}

// One thread per element.
template <class At, class A, class B, class Out, class Bias>
ARK_LOOP void one_by_one(const Product& s, const At& at, const A* a, const B* b, Out* out, const Bias* bias, int r0,
                         int r1, int c0, int c1) {
  const int64_t columns = c1 - c0;
  for_elements((r1 - r0) * columns, [&](int64_t i) {
    const int r = r0 + static_cast<int>(i / columns), c = c0 + static_cast<int>(i % columns);
    float sum = 0;
    for (int64_t d = 0; d < s.depth; ++d)
      sum = fused(load_one(a + at.a(r) + d * s.a_depth), load_one(b + d * s.b_depth + c * s.b_column), sum);
    finish_one(s, out + at.out(r), bias, r, c, sum);
  });
}

// Rows [r0, r1) at the positions that `at` returns, and columns [c0, c1). MostRows bounds the rows of all tiles
// together. kRows, kColumns: the shape of a tile of many rows, if the plan has chosen it.
template <int64_t MostRows, Product kShape, int kRows = 0, int kColumns = 0, class At, class A, class B, class Out,
          class Bias>
ARK_LOOP void product_of(const At& at, const A* a, const B* b, Out* out, const Bias* bias, int r0, int r1, int c0,
                         int c1) {
  constexpr Product s = kShape;
  if (r0 >= r1 || c0 >= c1) return;
  if constexpr (MostRows <= kFewRows<B>)
    few_rows<MostRows, s>(at, a, b, out, bias, r0, r1 - r0, 1, c0, c1);
  else if constexpr (kColumns == 0 && kSame<A, B> && MostRows <= kTensorRows && kDotsByTensor<s, B>)
    tensor_columns<MostRows, s.b_cache>(s, at, a, b, out, bias, r0, r1 - r0, c0, c1);
  else if constexpr (kSame<A, B>)
    many_rows<MostRows, s, kRows, kColumns>(at, a, b, out, bias, r0, r1, c0, c1);
  else
    one_by_one(s, at, a, b, out, bias, r0, r1, c0, c1);
}

template <int64_t MostRows, Product s, int kRows = 0, int kColumns = 0, class A, class B, class Out, class Bias>
ARK_LOOP void product(const A* a, const B* b, Out* out, const Bias* bias, int64_t r0, int64_t r1, int64_t c0,
                      int64_t c1) {
  product_of<MostRows, s, kRows, kColumns>(EvenRows{s.a_row, s.out_row}, a, b, out, bias, static_cast<int>(r0),
                                           static_cast<int>(r1), static_cast<int>(c0), static_cast<int>(c1));
}

}  // namespace ark::loop
