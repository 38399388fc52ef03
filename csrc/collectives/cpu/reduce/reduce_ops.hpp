// The operations that combine two accumulators. Private to the reduce_<isa>.cpp files.
//
// combine(a, b): a holds the earlier ranks, b is the next rank. Integers are unsigned except for MIN and MAX, so that
// they wrap. MIN and MAX on floats are IEEE 754-2019 minimum and maximum: NaN wins and -0 is below +0, so the order of
// ranks does not matter.
#pragma once

#include "reduce_lanes.hpp"

namespace ark::ARK_REDUCE_ISA {

struct PlainOp {
  static constexpr bool kPremultiply = false;  // first multiplies every rank's lanes by its factor
  static constexpr bool kAverage = false;      // divides by the number of ranks at the end
};

struct Sum : PlainOp {
  template <class V>
  static ARK_INLINE V combine(V a, V b) {
    return a + b;
  }
};
struct Average : Sum {
  static constexpr bool kAverage = true;
};
struct PremulSum : Sum {
  static constexpr bool kPremultiply = true;
};

struct Product : PlainOp {
  template <class V>
  static ARK_INLINE V combine(V a, V b) {
    return a * b;
  }
};

// Lanes are (real, imaginary) pairs: (ar br - ai bi, ar bi + ai br), each product rounded, as in c10::complex.
struct ComplexProduct : PlainOp {
  template <int kOr, int kAnd, int kXor, class V, int... I>
  static ARK_INLINE V pick(V v, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(v, v, (((I & kAnd) | kOr) ^ kXor)...);
  }
  template <class V>
  static ARK_INLINE V combine(V a, V b) {
    using Lanes = std::make_integer_sequence<int, sizeof(V) / sizeof(ElementOf<V>)>;
    const V real = pick<0, ~1, 0>(a, Lanes{});
    const V imaginary = pick<1, ~0, 0>(a, Lanes{});
    const V swapped = pick<0, ~0, 1>(b, Lanes{});
    const V cross = imaginary * swapped;
    const V minus_plus = blend(-cross, cross, Lanes{});
    return real * b + minus_plus;
  }

 private:
  template <class V, int... I>
  static ARK_INLINE V blend(V even, V odd, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(even, odd, ((I & 1) ? I + static_cast<int>(sizeof...(I)) : I)...);
  }
};

template <bool kMax>
struct Extremum : PlainOp {
  template <class V>
  static ARK_INLINE V combine(V a, V b) {
    const V picked = (kMax ? a > b : a < b) ? a : b;
    if constexpr (kIsFloat<V>) {
      using M = MaskOf<V>;
      const M zeros = kMax ? bits_as<M>(a) & bits_as<M>(b) : bits_as<M>(a) | bits_as<M>(b);
      const V ordered = a == b ? bits_as<V>(zeros) : picked;  // equal values can only differ in a zero's sign
      return ((a != a) | (b != b)) ? a + b : ordered;
    } else {
      return picked;
    }
  }
};
using Min = Extremum<false>;
using Max = Extremum<true>;

struct BitAnd : PlainOp {
  template <class V>
  static ARK_INLINE V combine(V a, V b) {
    return a & b;
  }
};
struct BitOr : PlainOp {
  template <class V>
  static ARK_INLINE V combine(V a, V b) {
    return a | b;
  }
};
struct BitXor : PlainOp {
  template <class V>
  static ARK_INLINE V combine(V a, V b) {
    return a ^ b;
  }
};

}  // namespace ark::ARK_REDUCE_ISA
