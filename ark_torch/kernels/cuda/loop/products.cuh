// Products of few rows that share their rows: a tile takes columns of each, and all of them pass as one run, so that
// memory keeps streaming from one product's columns to the next's.
//
// Columns are numbered consecutively. Each product's start at a multiple of what a warp takes together, or of an octet
// on tensor cores, so that these belong to one product; padding is not loaded. A column's sum has the same order as in
// the product alone.
#pragma once

#include "cuda/loop/matmul.cuh"

namespace ark::loop {

// Columns [c0, c1) of one of the products.
template <Product kShape, class BAt, class OutAt, class BiasAt>
struct Share {
  using Element = typename Pointee<BAt>::Type;
  static constexpr Product kProduct = kShape;
  BAt b;
  OutAt out;
  BiasAt bias;
  int c0, c1;
  // A copy from which the compiler cannot precompute anything, as Parts::anew().
  ARK_LOOP Share anew() const {
    Share same = *this;
    asm volatile("" : "+r"(same.c0), "+r"(same.c1));
    return same;
  }
  // The same with the address of b loaded once: faster if registers suffice.
  ARK_LOOP auto pointed() const { return Share<kShape, const Element*, OutAt, BiasAt>{now(b), out, bias, c0, c1}; }
};

template <Product kShape, class BAt, class OutAt, class BiasAt>
ARK_LOOP Share<kShape, BAt, OutAt, BiasAt> share(BAt b, OutAt out, BiasAt bias, int64_t c0, int64_t c1) {
  return {b, out, bias, static_cast<int>(c0), static_cast<int>(c1)};
}

// The columns of the shares, numbered from `begin` for the first one.
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
  static constexpr bool kOne = sizeof...(Rest) == 0;  // all columns are of one product
  static constexpr Product s = First::kProduct;

  const First first;
  const int begin, past, padded;
  const decltype(First::b) zero;  // where column number 0 would be
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

  ARK_LOOP decltype(First::b) origin(int c) const {
    if constexpr (sizeof...(Rest) == 0)
      return zero;
    else
      return c < padded ? zero : rest.origin(c);
  }
  ARK_LOOP const Element* from(int c) const { return now(origin(c)) + c * s.b_column; }
  ARK_LOOP int left(int c) const { return c < padded ? past - c : rest.left(c); }
  ARK_LOOP void finish(int row, int c, float sum) const {
    if (c < past)
      finish_one(s, now(first.out) + row * s.out_row, now(first.bias), row, first.c0 + c - begin, sum);
    else if (c >= padded)
      rest.finish(row, c, sum);
  }
};

template <int kRows, bool kFast, Product kShape, class AAt, class First, class... Rest>
ARK_LOOP void dot_runs(AAt a, const First& first, const Rest&... rest) {
  constexpr Product s = kShape;
  // Beside three products' addresses, registers suffice for eight columns with one row only.
  constexpr int kMost = kDotColumns<kRows, kFast, typename First::Element>;
  constexpr int kTogether = kMost == 8 && kRows > 1 && sizeof...(Rest) > 1 ? 4 : kMost;
  const auto runs = [&] { return Runs<kTogether, First, Rest...>(0, first.anew(), rest.anew()...); };
  const DepthSplit split = split_k(s.depth, 32 * kPerChunk<typename First::Element>);
  in_slices<kRows>(
      kRows, 1, 0, runs().total, split.slices, split.groups * kTogether,
      [&](int one, int count, int c, int batches, Parts parts) {
        dot_parts<kRows, kFast, kTogether, s.b_cache>(s, EvenRows{s.a_row, 0}, a, runs(), 0, kRows, one, count, c,
                                                      batches, parts);
      },
      [&](int row, int c, float sum) { runs().finish(row, c, sum); });
}

template <int kRows, Product kShape, class A, class First, class... Rest>
ARK_LOOP void tensor_runs(const A* a, const First& first, const Rest&... rest) {
  constexpr Product s = kShape;
  const auto runs = [&] { return Runs<8, First, Rest...>(0, first.anew(), rest.anew()...); };
  const DepthSplit split = split_k(s.depth, kTensorParts * kTensorPart);
  in_slices<kRows>(
      kRows, 1, 0, runs().total, split.slices, split.groups * kTensorOctets<EvenRows> * 8,
      [&](int, int, int c, int batches, Parts parts) {
        tensor_parts<kRows, s.b_cache>(s, EvenRows{s.a_row, 0}, a, runs(), 0, kRows, c, batches, parts);
      },
      [&](int row, int c, float sum) { runs().finish(row, c, sum); });
}

template <int kRows, class A, class One>
ARK_LOOP void product_alone(const A* a, const One& share) {
  product<kRows, One::kProduct>(a, now(share.b), now(share.out), now(share.bias), 0, kRows, share.c0, share.c1);
}

// All kRows rows of a. In every b the depth is contiguous and columns have the same stride. What the kernels above
// cannot load is computed product by product.
template <int kRows, class AAt, class First, class... Rest>
ARK_LOOP void products(AAt a, const First& first, const Rest&... rest) {
  using A = typename Pointee<AAt>::Type;
  using B = typename First::Element;
  constexpr Product s = First::kProduct;
  static_assert(((s.b_aligned == Rest::kProduct.b_aligned && s.b_cache == Rest::kProduct.b_cache) && ...));
  constexpr int kMostPointed = 4;  // rows with which registers suffice for several products' addresses
  if constexpr (kRows <= kFewRows<B> && kRows <= kMostPointed) {
    dot_runs<kRows, kDotsByChunk<s, B>, s>(now(a), first.pointed(), rest.pointed()...);
  } else if constexpr (kRows <= kFewRows<B>) {
    dot_runs<kRows, kDotsByChunk<s, B>, s>(a, first, rest...);
  } else if constexpr (kSame<A, B> && kRows <= kTensorRows && kDotsByTensor<s, B>) {
    tensor_runs<kRows, s>(now(a), first, rest...);
  } else {
    product_alone<kRows>(now(a), first);
    (product_alone<kRows>(now(a), rest), ...);
  }
}

}  // namespace ark::loop
