// A plan's pointwise operators on 16 lanes, by the names that plans use, and conversions between lane types.
//
// Edge cases follow PyTorch's eager operators: maximum and minimum propagate NaN, remainder has the divisor's sign, a
// cast from float to integer truncates, and gives the least integer for NaN and out-of-range values.
#pragma once

#include "cpu/math.hpp"
#include "cpu/vector.hpp"

namespace ark::cpu {

// ---- Conversions

ARK_INLINE Floats to_floats(Floats x) {
  return x;
}
ARK_INLINE Floats to_floats(Ints x) {
  return __builtin_convertvector(x, Floats);
}
ARK_INLINE Floats to_floats(Mask x) {
  return x ? splat(1.0f) : splat(0.0f);
}
ARK_INLINE Ints to_ints(Floats x) {
  return __builtin_convertvector(x, Ints);
}
ARK_INLINE Ints to_ints(Ints x) {
  return x;
}
ARK_INLINE Ints to_ints(Mask x) {
  return -__builtin_convertvector(x, Ints);
}
ARK_INLINE Ints to_int32(Floats x) {
  return __builtin_convertvector(__builtin_convertvector(x, Shorts), Ints);
}
ARK_INLINE Mask to_mask(Floats x) {
  return x != 0.0f;
}
ARK_INLINE Mask narrow_mask(Ints x) {
  return __builtin_convertvector(x, Mask);
}
ARK_INLINE Mask to_mask(Ints x) {
  return narrow_mask(x != 0);
}
ARK_INLINE Mask to_mask(Mask x) {
  return x;
}

// A number that all lanes hold.
ARK_INLINE float one(Floats x) {
  return x[0];
}
ARK_INLINE int64_t one(Ints x) {
  return x[0];
}
ARK_INLINE bool one(Mask x) {
  return x[0] != 0;
}

// Rounds to a narrower type, but stays in the same lanes.
ARK_INLINE Floats round_to(Floats x, bf16 type) {
  return widen(narrow(x, type), type);
}
ARK_INLINE Floats round_to(Floats x, f16 type) {
  return widen(narrow(x, type), type);
}
ARK_INLINE Ints round_to(Ints x, int32_t) {
  return __builtin_convertvector(__builtin_convertvector(x, Shorts), Ints);
}

// ---- Arithmetic

ARK_INLINE Floats add(Floats x, Floats y) {
  return x + y;
}
ARK_INLINE Floats sub(Floats x, Floats y) {
  return x - y;
}
ARK_INLINE Floats mul(Floats x, Floats y) {
  return x * y;
}
ARK_INLINE Floats div(Floats x, Floats y) {
  return x / y;
}
ARK_INLINE Floats neg(Floats x) {
  return -x;
}
ARK_INLINE Floats reciprocal(Floats x) {
  return 1.0f / x;
}
ARK_INLINE Floats square(Floats x) {
  return x * x;
}
ARK_INLINE Floats cube(Floats x) {
  return x * x * x;
}
ARK_INLINE Floats maximum(Floats x, Floats y) {
  return x > y ? x : x != x ? x : y;
}
ARK_INLINE Floats minimum(Floats x, Floats y) {
  return x < y ? x : x != x ? x : y;
}
ARK_INLINE Floats relu(Floats x) {
  return x < 0.0f ? splat(0.0f) : x;
}
ARK_INLINE Floats silu(Floats x) {
  return x / (1.0f + exp(-x));
}
ARK_INLINE Floats sign(Floats x) {
  return x > 0.0f ? splat(1.0f) : x < 0.0f ? splat(-1.0f) : splat(0.0f);
}
ARK_INLINE Floats remainder(Floats x, Floats y) {
  const Floats rest = fmod(x, y);
  return ((rest != 0.0f) & ((rest < 0.0f) != (y < 0.0f))) ? rest + y : rest;
}
ARK_INLINE Floats floor_divide(Floats x, Floats y) {
  const Floats rest = fmod(x, y);
  Floats quotient = (x - rest) / y;
  quotient = ((rest != 0.0f) & ((rest < 0.0f) != (y < 0.0f))) ? quotient - 1.0f : quotient;
  const Floats whole = floor(quotient);
  const Floats near = quotient - whole > 0.5f ? whole + 1.0f : whole;
  return y == 0.0f ? x / y : quotient != 0.0f ? near : copysign(splat(0.0f), x / y);
}

ARK_INLINE Ints add(Ints x, Ints y) {
  return x + y;
}
ARK_INLINE Ints sub(Ints x, Ints y) {
  return x - y;
}
ARK_INLINE Ints mul(Ints x, Ints y) {
  return x * y;
}
ARK_INLINE Ints neg(Ints x) {
  return -x;
}
ARK_INLINE Ints square(Ints x) {
  return x * x;
}
ARK_INLINE Ints cube(Ints x) {
  return x * x * x;
}
ARK_INLINE Ints abs(Ints x) {
  return x < 0 ? -x : x;
}
ARK_INLINE Ints maximum(Ints x, Ints y) {
  return x > y ? x : y;
}
ARK_INLINE Ints minimum(Ints x, Ints y) {
  return x < y ? x : y;
}
ARK_INLINE Ints relu(Ints x) {
  return x < 0 ? Ints{} : x;
}
// Rounding does not change integers.
ARK_INLINE Ints floor(Ints x) {
  return x;
}
ARK_INLINE Ints ceil(Ints x) {
  return x;
}
ARK_INLINE Ints trunc(Ints x) {
  return x;
}
ARK_INLINE Ints round(Ints x) {
  return x;
}
ARK_INLINE Ints sign(Ints x) {
  return (x < 0) - (x > 0);
}
// Integers as in PyTorch: overflow wraps around, and the reciprocal of any integer but 1 and -1 is 0.
ARK_INLINE Ints pow(Ints x, Ints y) {
  using Wrapping = uint64_t __attribute__((vector_size(kLanes * 8)));
  Wrapping result = Wrapping{} + 1, base = same_bits<Wrapping>(x);
  Ints left = y < 0 ? Ints{} : y;
  for (int64_t any = 1; any != 0;) {
    result = (left & 1) != 0 ? result * base : result;
    base *= base;
    left >>= 1;
    any = 0;
    for (int lane = 0; lane < kLanes; ++lane) any |= left[lane];
  }
  const Ints inverse = x == 1 ? Ints{} + 1 : x == -1 ? 1 - 2 * (y & 1) : Ints{};
  return y < 0 ? inverse : same_bits<Ints>(result);
}
// Never by 0: plans divide integers by literals only. The least integer divided by -1 would trap.
ARK_INLINE Ints quotient_of(Ints x, Ints y) {
  using Wrapping = uint64_t __attribute__((vector_size(kLanes * 8)));
  const Ints quotient = x / (y == -1 ? Ints{} + 1 : y);
  return y == -1 ? same_bits<Ints>(-same_bits<Wrapping>(x)) : quotient;
}
ARK_INLINE Ints floor_divide(Ints x, Ints y) {
  const Ints quotient = quotient_of(x, y), rest = x - quotient * y;
  return quotient + ((rest != 0) & ((rest < 0) != (y < 0)));
}
ARK_INLINE Ints remainder(Ints x, Ints y) {
  const Ints rest = x - quotient_of(x, y) * y;
  return rest + (y & (rest != 0) & ((rest < 0) != (y < 0)));
}
ARK_INLINE Ints fmod(Ints x, Ints y) {
  return x - quotient_of(x, y) * y;
}

ARK_INLINE Mask maximum(Mask x, Mask y) {
  return x | y;
}
ARK_INLINE Mask minimum(Mask x, Mask y) {
  return x & y;
}
ARK_INLINE Mask add(Mask x, Mask y) {
  return x | y;
}
ARK_INLINE Mask mul(Mask x, Mask y) {
  return x & y;
}

// ---- Comparisons

#define ARK_COMPARISON(name, sign)           \
  ARK_INLINE Mask name(Floats x, Floats y) { \
    return x sign y;                         \
  }                                          \
  ARK_INLINE Mask name(Ints x, Ints y) {     \
    return narrow_mask(x sign y);            \
  }                                          \
  ARK_INLINE Mask name(Mask x, Mask y) {     \
    return (x & 1) sign(y & 1);              \
  }
ARK_COMPARISON(eq, ==)
ARK_COMPARISON(ne, !=)
ARK_COMPARISON(lt, <)
ARK_COMPARISON(le, <=)
ARK_COMPARISON(gt, >)
ARK_COMPARISON(ge, >=)
#undef ARK_COMPARISON

ARK_INLINE Mask isnan(Floats x) {
  return x != x;
}
ARK_INLINE Mask isinf(Floats x) {
  return abs(x) == kInfinity;
}
ARK_INLINE Mask isfinite(Floats x) {
  return abs(x) < kInfinity;
}

// ---- Logic

template <class Lanes>
ARK_INLINE Lanes bitwise_and(Lanes x, Lanes y) {
  return x & y;
}
template <class Lanes>
ARK_INLINE Lanes bitwise_or(Lanes x, Lanes y) {
  return x | y;
}
template <class Lanes>
ARK_INLINE Lanes bitwise_xor(Lanes x, Lanes y) {
  return x ^ y;
}
template <class Lanes>
ARK_INLINE Lanes bitwise_not(Lanes x) {
  return ~x;
}

}  // namespace ark::cpu
