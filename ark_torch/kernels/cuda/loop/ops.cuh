// A plan's pointwise operators on one number, by the names that plans use, and conversions between types.
//
// As in cpu/ops.hpp, edge cases follow PyTorch's eager operators: maximum and minimum propagate NaN, remainder has the
// divisor's sign, a cast from float to integer truncates.
#pragma once

#include "cuda/loop/math.cuh"
#include "cuda/loop/types.cuh"

namespace ark::loop {

// ---- Conversions

ARK_LOOP Floats to_floats(Floats x) {
  return x;
}
ARK_LOOP Floats to_floats(Ints x) {
  return static_cast<float>(x);
}
ARK_LOOP Floats to_floats(Mask x) {
  return x ? 1.0f : 0.0f;
}
// As eager PyTorch on the same device: cvt.rzi saturates, and turns NaN into the least int64 or an int32 of 0.
ARK_LOOP Ints to_ints(Floats x) {
  return static_cast<int64_t>(x);
}
ARK_LOOP Ints to_int32(Floats x) {
  return static_cast<int32_t>(x);
}
ARK_LOOP Ints to_ints(Ints x) {
  return x;
}
ARK_LOOP Ints to_ints(Mask x) {
  return x ? 1 : 0;
}
ARK_LOOP Mask to_mask(Floats x) {
  return x != 0.0f;
}
ARK_LOOP Mask to_mask(Ints x) {
  return x != 0;
}
ARK_LOOP Mask to_mask(Mask x) {
  return x;
}

// A per-row number.
template <class V>
ARK_LOOP V one(V x) {
  return x;
}

template <class V>
ARK_LOOP V select(Mask mask, V a, V b) {
  return mask ? a : b;
}

// ---- Arithmetic

ARK_LOOP Floats add(Floats x, Floats y) {
  return x + y;
}
ARK_LOOP Floats sub(Floats x, Floats y) {
  return x - y;
}
ARK_LOOP Floats mul(Floats x, Floats y) {
  return x * y;
}
ARK_LOOP Floats div(Floats x, Floats y) {
  return x / y;
}
ARK_LOOP Floats neg(Floats x) {
  return -x;
}
ARK_LOOP Floats reciprocal(Floats x) {
  return 1.0f / x;
}
ARK_LOOP Floats square(Floats x) {
  return x * x;
}
ARK_LOOP Floats cube(Floats x) {
  return x * x * x;
}
// The maximum of two zeros of different sign is +0, the minimum is -0.
ARK_LOOP Floats maximum(Floats x, Floats y) {
  return x != x || y != y ? x + y : ::fmaxf(x, y);
}
ARK_LOOP Floats minimum(Floats x, Floats y) {
  return x != x || y != y ? x + y : ::fminf(x, y);
}
ARK_LOOP Floats relu(Floats x) {
  return x <= 0.0f ? 0.0f : x;
}
ARK_LOOP Floats silu(Floats x) {
  return x / (1.0f + exp(-x));
}
ARK_LOOP Floats sign(Floats x) {
  return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f;
}
ARK_LOOP Floats remainder(Floats x, Floats y) {
  const Floats rest = fmod(x, y);
  return rest != 0.0f && (rest < 0.0f) != (y < 0.0f) ? rest + y : rest;
}
ARK_LOOP Floats floor_divide(Floats x, Floats y) {
  const Floats rest = fmod(x, y);
  Floats quotient = (x - rest) / y;
  if (rest != 0.0f && (rest < 0.0f) != (y < 0.0f)) quotient = quotient - 1.0f;
  const Floats whole = floor(quotient);
  const Floats near = quotient - whole > 0.5f ? whole + 1.0f : whole;
  return y == 0.0f ? x / y : quotient != 0.0f ? near : copysign(0.0f, x / y);
}

// Integers wrap around on overflow.
ARK_LOOP Ints wrapped(uint64 x) {
  return static_cast<int64_t>(x);
}
ARK_LOOP Ints add(Ints x, Ints y) {
  return wrapped(static_cast<uint64>(x) + static_cast<uint64>(y));
}
ARK_LOOP Ints sub(Ints x, Ints y) {
  return wrapped(static_cast<uint64>(x) - static_cast<uint64>(y));
}
ARK_LOOP Ints mul(Ints x, Ints y) {
  return wrapped(static_cast<uint64>(x) * static_cast<uint64>(y));
}
ARK_LOOP Ints neg(Ints x) {
  return wrapped(-static_cast<uint64>(x));
}
ARK_LOOP Ints square(Ints x) {
  return mul(x, x);
}
ARK_LOOP Ints cube(Ints x) {
  return mul(mul(x, x), x);
}
ARK_LOOP Ints abs(Ints x) {
  return x < 0 ? neg(x) : x;
}
ARK_LOOP Ints maximum(Ints x, Ints y) {
  return x > y ? x : y;
}
ARK_LOOP Ints minimum(Ints x, Ints y) {
  return x < y ? x : y;
}
ARK_LOOP Ints relu(Ints x) {
  return x < 0 ? 0 : x;
}
// Rounding does not change integers.
ARK_LOOP Ints floor(Ints x) {
  return x;
}
ARK_LOOP Ints ceil(Ints x) {
  return x;
}
ARK_LOOP Ints trunc(Ints x) {
  return x;
}
ARK_LOOP Ints round(Ints x) {
  return x;
}
ARK_LOOP Ints sign(Ints x) {
  return (x > 0) - (x < 0);
}
// The reciprocal of any integer but 1 and -1 is 0.
ARK_LOOP Ints pow(Ints x, Ints y) {
  if (y < 0) return x == 1 ? 1 : x == -1 ? 1 - 2 * (y & 1) : 0;
  Ints result = 1;
  for (; y != 0; y >>= 1) {
    if ((y & 1) != 0) result = mul(result, x);
    x = mul(x, x);
  }
  return result;
}
// Never by 0: plans divide integers by literals only. The least integer divided by -1 overflows.
ARK_LOOP Ints quotient_of(Ints x, Ints y) {
  return y == -1 ? neg(x) : x / y;
}
ARK_LOOP Ints fmod(Ints x, Ints y) {
  return sub(x, mul(quotient_of(x, y), y));
}
ARK_LOOP Ints floor_divide(Ints x, Ints y) {
  const Ints quotient = quotient_of(x, y), rest = sub(x, mul(quotient, y));
  return rest != 0 && (rest < 0) != (y < 0) ? quotient - 1 : quotient;
}
ARK_LOOP Ints remainder(Ints x, Ints y) {
  const Ints rest = fmod(x, y);
  return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}

ARK_LOOP Mask maximum(Mask x, Mask y) {
  return x || y;
}
ARK_LOOP Mask minimum(Mask x, Mask y) {
  return x && y;
}
ARK_LOOP Mask add(Mask x, Mask y) {
  return x || y;
}
ARK_LOOP Mask mul(Mask x, Mask y) {
  return x && y;
}

// ---- Comparisons

#define ARK_COMPARISON(name, sign)         \
  ARK_LOOP Mask name(Floats x, Floats y) { \
    return x sign y;                       \
  }                                        \
  ARK_LOOP Mask name(Ints x, Ints y) {     \
    return x sign y;                       \
  }                                        \
  ARK_LOOP Mask name(Mask x, Mask y) {     \
    return x sign y;                       \
  }
ARK_COMPARISON(eq, ==)
ARK_COMPARISON(ne, !=)
ARK_COMPARISON(lt, <)
ARK_COMPARISON(le, <=)
ARK_COMPARISON(gt, >)
ARK_COMPARISON(ge, >=)
#undef ARK_COMPARISON

ARK_LOOP Mask isnan(Floats x) {
  return x != x;
}
ARK_LOOP Mask isinf(Floats x) {
  return abs(x) == kInfinity;
}
ARK_LOOP Mask isfinite(Floats x) {
  return abs(x) < kInfinity;
}

// ---- Logic

template <class V>
ARK_LOOP V bitwise_and(V x, V y) {
  return x & y;
}
template <class V>
ARK_LOOP V bitwise_or(V x, V y) {
  return x | y;
}
template <class V>
ARK_LOOP V bitwise_xor(V x, V y) {
  return x ^ y;
}
ARK_LOOP Ints bitwise_not(Ints x) {
  return ~x;
}
ARK_LOOP Mask bitwise_not(Mask x) {
  return !x;
}

}  // namespace ark::loop
