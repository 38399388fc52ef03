// Columns of quantized weights with their scales and zeros: of one product, or of several that share their rows, whose
// columns are then numbered consecutively as in products.cuh.
#pragma once

#include "cuda/loop/decode.cuh"

namespace ark::loop {

inline constexpr int kDequantColumns = 16;  // columns per warp: the tensor core's lines

// Columns [c0, c1) of a product. Addresses of operands are loaded where they are used (Later of task.cuh).
template <Product kShape, Codes kCodes, class BAt, class ScaleAt, class ZeroAt, class OutAt, class BiasAt>
struct CodedShare {
  using Element = typename Pointee<BAt>::Type;
  using ScaleElement = typename Pointee<ScaleAt>::Type;
  using ZeroElement = typename Pointee<ZeroAt>::Type;
  static constexpr Product kProduct = kShape;
  static constexpr Codes q = kCodes;
  BAt b;
  ScaleAt scales;
  ZeroAt zeros;
  OutAt out;
  BiasAt bias;
  int c0, c1;

  ARK_LOOP const Element* column(int c) const { return now(b) + c * kProduct.b_column; }
  ARK_LOOP const ScaleElement* scale_at(int g, int c) const {
    return now(scales) + g * static_cast<int64_t>(q.scale.group) + c * static_cast<int64_t>(q.scale.column);
  }
  ARK_LOOP const ZeroElement* zero_at(int g, int c) const {
    return now(zeros) + g * static_cast<int64_t>(q.zero.group) + c * static_cast<int64_t>(q.zero.column);
  }
  ARK_LOOP float scale(int g, int c) const {
    if constexpr (kSame<ScaleElement, NoScale>)
      return 1;
    else
      return load_one(scale_at(g, c));
  }
  ARK_LOOP float zero(int g, int c) const {
    if constexpr (kSame<ZeroElement, NoScale>)
      return 0;
    else
      return static_cast<float>(load_one(zero_at(g, c)));
  }
  // A copy from which the compiler cannot precompute anything, as Parts::anew().
  ARK_LOOP CodedShare anew() const {
    CodedShare same = *this;
    asm volatile("" : "+r"(same.c0), "+r"(same.c1));
    return same;
  }
};

template <Product kShape, Codes kCodes, class BAt, class ScaleAt, class ZeroAt, class OutAt, class BiasAt>
ARK_LOOP CodedShare<kShape, kCodes, BAt, ScaleAt, ZeroAt, OutAt, BiasAt> coded_share(BAt b, ScaleAt scales,
                                                                                     ZeroAt zeros, OutAt out,
                                                                                     BiasAt bias, int64_t c0,
                                                                                     int64_t c1) {
  return {b, scales, zeros, out, bias, static_cast<int>(c0), static_cast<int>(c1)};
}

// The columns of the shares, numbered from `begin` for the first one, and from a multiple of kDequantColumns for each
// later one.
template <class... Shares>
struct CodedRuns {
  const int total;
  ARK_LOOP explicit CodedRuns(int begin) : total(begin) {}
};

template <class First, class... Rest>
struct CodedRuns<First, Rest...> {
  using Element = typename First::Element;
  using ScaleElement = typename First::ScaleElement;
  using ZeroElement = typename First::ZeroElement;
  static constexpr Product s = First::kProduct;
  static constexpr Codes q = First::q;
  static constexpr bool kLast = sizeof...(Rest) == 0;
  // Strides of scales and zeros; 0 if those of the shares differ.
  static constexpr int64_t kScaleGroup = ((Rest::q.scale.group == q.scale.group) && ...) ? q.scale.group : 0;
  static constexpr int64_t kScaleColumn = ((Rest::q.scale.column == q.scale.column) && ...) ? q.scale.column : 0;
  static constexpr int64_t kZeroGroup = ((Rest::q.zero.group == q.zero.group) && ...) ? q.zero.group : 0;
  static constexpr int64_t kZeroColumn = ((Rest::q.zero.column == q.zero.column) && ...) ? q.zero.column : 0;

  const First first;
  const int begin;
  const CodedRuns<Rest...> rest;
  const int total;

  ARK_LOOP CodedRuns(int begin, const First& first, const Rest&... others)
      : first(first), begin(begin), rest(padded(begin, first), others...), total(kLast ? past() : rest.total) {}

  static ARK_LOOP int padded(int begin, const First& of) {
    return begin + static_cast<int>(in_wholes(of.c1 - of.c0, kDequantColumns)) * kDequantColumns;
  }
  ARK_LOOP int past() const { return begin + first.c1 - first.c0; }
  ARK_LOOP bool mine(int c) const { return kLast || c < padded(begin, first); }
  ARK_LOOP int own(int c) const { return first.c0 + c - begin; }

  ARK_LOOP const Element* from(int c) const {
    if constexpr (!kLast)
      if (!mine(c)) return rest.from(c);
    return first.column(own(c));
  }
  ARK_LOOP int left(int c) const {
    if constexpr (!kLast)
      if (!mine(c)) return rest.left(c);
    return past() - c;
  }
  ARK_LOOP const ScaleElement* scale_at(int g, int c) const {
    if constexpr (!kLast)
      if (!mine(c)) return rest.scale_at(g, c);
    return first.scale_at(g, own(c));
  }
  ARK_LOOP const ZeroElement* zero_at(int g, int c) const {
    if constexpr (!kLast)
      if (!mine(c)) return rest.zero_at(g, c);
    return first.zero_at(g, own(c));
  }
  // kScale: the scale was not applied to parts of the sum, so it is applied here.
  template <bool kScale>
  ARK_LOOP void finish(int row, int c, float sum) const {
    if constexpr (!kLast)
      if (!mine(c)) return rest.template finish<kScale>(row, c, sum);
    if (c >= past()) return;
    if constexpr (kScale) sum *= first.scale(0, own(c));
    finish_one(s, now(first.out) + row * s.out_row, now(first.bias), row, own(c), sum);
  }
};

}  // namespace ark::loop
