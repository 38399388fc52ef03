// Products of few rows that share their rows: a tile takes columns of each, and all of them pass as one run, so that
// memory streams on from one product's columns to the next's.
//
// Columns are numbered through, and each product's begin at a multiple of what a warp takes together: that many are of
// one product, and what is padded is not loaded. How a column's sum is added up is as in a product by itself.
#pragma once

#include "cuda/loop/matmul.cuh"

namespace ark::loop {

// Columns [c0, c1) of one of the products.
template <Product kShape, class B, class OutAt, class BiasAt>
struct Share {
  using Element = B;
  static constexpr Product kProduct = kShape;
  const B* b;
  OutAt out;
  BiasAt bias;
  int c0, c1;
};

template <Product kShape, class B, class OutAt, class BiasAt>
ARK_LOOP Share<kShape, B, OutAt, BiasAt> share(const B* b, OutAt out, BiasAt bias, int64_t c0, int64_t c1) {
  return {b, out, bias, static_cast<int>(c0), static_cast<int>(c1)};
}

// The shares' columns, the first one's from number `begin` on.
template <int kTogether, class... Shares>
struct Runs {
  const int total;
  ARK_LOOP explicit Runs(int begin) : total(begin) {}
  ARK_LOOP int left(int) const { return 0; }
  ARK_LOOP void finish(int, int, float) const {}
};

template <int kTogether, class First, class... Rest>
struct Runs<kTogether, First, Rest...> {
  using Element = typename First::Element;
  static constexpr bool kOneProduct = sizeof...(Rest) == 0;
  static constexpr Product s = First::kProduct;

  const First first;
  const int begin, past, padded;
  const Element* const zero;  // where number 0 would lie
  const Runs<kTogether, Rest...> rest;
  const int total;

  ARK_LOOP Runs(int begin, const First& first, const Rest&... others)
      : first(first),
        begin(begin),
        past(begin + first.c1 - first.c0),
        padded(begin + static_cast<int>(in_wholes(first.c1 - first.c0, kTogether)) * kTogether),
        zero(first.b + (first.c0 - begin) * s.b_column),
        rest(padded, others...),
        total(rest.total) {}

  ARK_LOOP const Element* origin(int c) const {
    if constexpr (sizeof...(Rest) == 0)
      return zero;
    else
      return c < padded ? zero : rest.origin(c);
  }
  ARK_LOOP const Element* from(int c) const { return origin(c) + c * s.b_column; }
  ARK_LOOP int left(int c) const { return c < padded ? past - c : rest.left(c); }
  ARK_LOOP void finish(int row, int c, float sum) const {
    if (c < past)
      finish_one(s, now(first.out) + row * s.out_row, now(first.bias), row, first.c0 + c - begin, sum);
    else if (c >= padded)
      rest.finish(row, c, sum);
  }
};

template <int kRows, bool kFast, Product s, class A, class First, class... Rest>
ARK_LOOP void dot_runs(const A* a, const First& first, const Rest&... rest) {
  // Three products' addresses leave registers for eight columns beside one row, no more (H200: 2% slower, no spills).
  constexpr int kMost = kDotColumns<kRows, kFast, typename First::Element>;
  constexpr int kTogether = kMost == 8 && kRows > 1 && sizeof...(Rest) > 1 ? 4 : kMost;
  const Runs<kTogether, First, Rest...> runs(0, first, rest...);
  const DepthSplit split = split_depth(s.depth, 32 * kPerChunk<typename First::Element>);
  in_slices<kRows>(
      kRows, 1, 0, 0, runs.total, split.slices, split.groups * kTogether,
      [&](int one, int count, int c, int batches, Parts parts) {
        dot_parts<kRows, kFast, kTogether>(s, EvenRows{s.a_row, 0}, a, runs, 0, kRows, one, count, c, batches, parts);
      },
      [&](int row, int c, float sum) { runs.finish(row, c, sum); });
}

template <int kRows, Product s, class A, class First, class... Rest>
ARK_LOOP void tensor_runs(const A* a, const First& first, const Rest&... rest) {
  constexpr int kTogether = kTensorOctets<EvenRows, sizeof...(Rest) == 0> * 8;
  const Runs<kTogether, First, Rest...> runs(0, first, rest...);
  const DepthSplit split = split_depth(s.depth, kTensorParts * kTensorPart);
  in_slices<kRows>(
      kRows, 1, 0, 0, runs.total, split.slices, split.groups * kTogether,
      [&](int, int, int c, int batches, Parts parts) {
        tensor_parts<kRows>(s, EvenRows{s.a_row, 0}, a, runs, 0, kRows, c, batches, parts);
      },
      [&](int row, int c, float sum) { runs.finish(row, c, sum); });
}

template <int kRows, class A, Product s, class B, class OutAt, class BiasAt>
ARK_LOOP void product_alone(const A* a, const Share<s, B, OutAt, BiasAt>& share) {
  product<kRows, s>(a, share.b, now(share.out), now(share.bias), 0, kRows, share.c0, share.c1);
}

// All kRows rows of a, whose columns' depth is adjacent in every b, and as far apart in one as in the other. What the
// kernels above cannot load is computed product by product.
template <int kRows, class A, class First, class... Rest>
ARK_LOOP void products(const A* a, const First& first, const Rest&... rest) {
  using B = typename First::Element;
  constexpr Product s = First::kProduct;
  static_assert(((s.b_aligned == Rest::kProduct.b_aligned) && ...));
  if constexpr (kRows <= kFewRows<B>) {
    dot_runs<kRows, kDotsByChunk<s, B>, s>(a, first, rest...);
  } else if constexpr (kSame<A, B> && kRows <= kTensorRows && kDotsByTensor<s, B>) {
    tensor_runs<kRows, s>(a, first, rest...);
  } else {
    product_alone<kRows>(a, first);
    (product_alone<kRows>(a, rest), ...);
  }
}

}  // namespace ark::loop
