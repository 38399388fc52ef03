// Elementary functions on 16 lanes of float32.
//
// They are implemented here, since libm's take one number at a time, and without -ffast-math, since infinities and NaN
// are valid values (masks contain -inf). Largest errors over the whole range in ulp, checked against double by
// tests/csrc/compiler/emit/cpu_math_test.cpp: exp 1, log 1, tanh 1.5, erf 1, sin and cos 1.5, sigmoid 2.5, rsqrt 1.5;
// libm's own for functions that call it lane by lane. A per-row number uses the same code as 16 lanes, so a value's
// bits do not depend on which of the two it is.
#pragma once

#include "cpu/types.hpp"

namespace ark::cpu {

using Doubles = double __attribute__((vector_size(kLanes * 8)));

// Applies a scalar function to each lane; the compiler vectorizes it where it can.
template <class Function>
ARK_INLINE Floats lanewise(Floats x, Function&& function) {
  float lanes[kLanes];
  std::memcpy(lanes, &x, sizeof(x));
  for (int i = 0; i < kLanes; ++i) lanes[i] = function(lanes[i]);
  std::memcpy(&x, lanes, sizeof(x));
  return x;
}
template <class Function>
ARK_INLINE Floats lanewise(Floats x, Floats y, Function&& function) {
  float lanes[kLanes], others[kLanes];
  std::memcpy(lanes, &x, sizeof(x));
  std::memcpy(others, &y, sizeof(y));
  for (int i = 0; i < kLanes; ++i) lanes[i] = function(lanes[i], others[i]);
  std::memcpy(&x, lanes, sizeof(x));
  return x;
}

ARK_INLINE Floats sqrt(Floats x) {
  return lanewise(x, [](float one) { return __builtin_sqrtf(one); });
}
ARK_INLINE Floats rsqrt(Floats x) {
  return 1.0f / sqrt(x);
}
ARK_INLINE Floats floor(Floats x) {
  return lanewise(x, [](float one) { return __builtin_floorf(one); });
}
ARK_INLINE Floats ceil(Floats x) {
  return lanewise(x, [](float one) { return __builtin_ceilf(one); });
}
ARK_INLINE Floats trunc(Floats x) {
  return lanewise(x, [](float one) { return __builtin_truncf(one); });
}
// Rounds halves to even.
ARK_INLINE Floats round(Floats x) {
  return lanewise(x, [](float one) { return __builtin_nearbyintf(one); });
}
ARK_INLINE Floats abs(Floats x) {
  return same_bits<Floats>(same_bits<Words>(x) & 0x7fffffffu);
}
// The magnitude of x with the sign of y.
ARK_INLINE Floats copysign(Floats x, Floats y) {
  return same_bits<Floats>((same_bits<Words>(x) & 0x7fffffffu) | (same_bits<Words>(y) & 0x80000000u));
}

// To the nearest float8_e4m3fn, halves to even, as PyTorch's conversion: what exceeds 464 becomes NaN.
ARK_INLINE Floats round_e4m3(Floats x) {
  const Floats magnitude = abs(x);
  const Words bits = same_bits<Words>(magnitude);
  const Floats normal = same_bits<Floats>((bits + 0x7ffffu + ((bits >> 20) & 1u)) & 0xfff00000u);
  const Floats magic = splat(0x1.8p14f);  // adding it leaves a multiple of the least subnormal number, 2^-9
  const Floats subnormal = (magnitude + magic) - magic;
  const Floats rounded = magnitude < 0x1p-6f ? subnormal : normal;
  return copysign(magnitude <= 464.0f ? rounded : splat(kNan), x);
}

// x * 2^n for n in [-252, 254], in two factors so that subnormal results round once.
ARK_INLINE Floats scale(Floats x, Shorts n) {
  const Shorts half = n >> 1;
  return x * same_bits<Floats>((half + 127) << 23) * same_bits<Floats>((n - half + 127) << 23);
}

// exp(x) = 2^n exp(r), |r| <= ln 2 / 2; the polynomial is from Cephes.
ARK_INLINE Floats exp(Floats x) {
  // Beyond these bounds the result is infinity or 0; NaN fails both comparisons.
  const Floats bounded = x > 89.0f ? splat(89.0f) : x < -104.0f ? splat(-104.0f) : x;
  const Floats magic = splat(0x1.8p23f);  // adding it leaves the nearest integer in the low bits
  const Floats shifted = bounded * 1.44269504088896341f + magic;
  const Floats n = shifted - magic;
  const Floats r = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return scale(p, same_bits<Shorts>(shifted) - same_bits<Shorts>(magic));
}

// log(x) = n ln 2 + log(m), m in [sqrt(1/2), sqrt(2)); the polynomial is from Cephes.
ARK_INLINE Floats log(Floats x) {
  const Mask subnormal = x < 0x1p-126f;
  const Floats normal = subnormal ? x * 0x1p23f : x;
  const Shorts bits = same_bits<Shorts>(normal);
  Shorts n = ((bits >> 23) & 0xff) - 126 - (subnormal & 23);
  Floats m = same_bits<Floats>((bits & 0x007fffff) | 0x3f000000);  // [0.5, 1)
  const Mask low = m < 0.707106781186547524f;
  n = n + low;
  m = (low ? m + m : m) - 1.0f;
  const Floats z = m * m;
  Floats p = splat(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const Floats exponent = __builtin_convertvector(n, Floats);
  Floats y = p * m * z + exponent * -2.12194440e-4f - 0.5f * z;
  y = m + y + exponent * 0.693359375f;
  y = x < kInfinity ? y : x;             // infinity and NaN
  y = x > 0.0f ? y : splat(-kInfinity);  // 0 and below
  return x < 0.0f ? splat(kNan) : x != x ? x : y;
}

ARK_INLINE Floats sigmoid(Floats x) {
  const Floats e = exp(-abs(x));
  return (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

ARK_INLINE Floats tanh(Floats x) {
  const Floats z = x * x;
  Floats p = splat(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const Floats small = p * z * x + x;
  const Floats magnitude = abs(x);
  const Floats large = 1.0f - 2.0f / (exp(magnitude + magnitude) + 1.0f);
  return copysign(magnitude < 0.625f ? small : large, x);  // also for zero
}

// N. Juffa's polynomials: erf near 0, 1 - exp(polynomial) elsewhere.
ARK_INLINE Floats erf(Floats x) {
  const Floats t = abs(x), s = x * x;
  Floats far = -1.72853470e-5f * t + 3.83197126e-4f;
  const Floats even = -3.88396438e-3f * t + 2.42546219e-2f;
  far = far * s + even;
  far = far * t - 1.06777877e-1f;
  far = far * t - 6.34846687e-1f;
  far = far * t - 1.28717512e-1f;
  far = far * t - t;
  far = 1.0f - exp(far);
  far = t > 4.0f ? splat(1.0f) : far;
  Floats near = splat(-5.96761703e-4f);
  near = near * s + 4.99119423e-3f;
  near = near * s - 2.67681349e-2f;
  near = near * s + 1.12819925e-1f;
  near = near * s - 3.76125336e-1f;
  near = near * s + 1.28379166e-1f;
  near = near * x + x;
  return t > 0.921875f ? copysign(far, x) : near;  // NaN: near
}

// x - n pi/2, computed in double, so that rotary embeddings keep all bits at any position.
struct Quarter {
  Floats rest;  // in [-pi/4, pi/4]
  Shorts turns;
};
ARK_INLINE Quarter quarter_turns(Floats x) {
  const Doubles wide = __builtin_convertvector(x, Doubles);
  const Doubles magic = Doubles{} + 0x1.8p52;
  const Doubles shifted = wide * 0.63661977236758134308 + magic;
  const Doubles n = shifted - magic;
  const Doubles rest = (wide - n * 0x1.921fb54400000p+0) - n * 0x1.0b4611a626331p-34;
  return {__builtin_convertvector(rest, Floats), __builtin_convertvector(same_bits<Ints>(shifted), Shorts)};
}
inline constexpr float kLargestAngle = 0x1p20f;  // n has 20 bits, so n times the first 33 bits of pi/2 is exact; larger
                                                 // angles use libm

ARK_INLINE Floats sine_or_cosine(Floats x, int quarter) {
  const Quarter q = quarter_turns(x);
  const Shorts turns = q.turns + quarter;
  const Floats r = q.rest, z = r * r;
  Floats sine = splat(-1.9515295891e-4f);
  sine = sine * z + 8.3321608736e-3f;
  sine = sine * z - 1.6666654611e-1f;
  sine = sine * z * r + r;
  Floats cosine = splat(2.443315711809948e-5f);
  cosine = cosine * z - 1.388731625493765e-3f;
  cosine = cosine * z + 4.166664568298827e-2f;
  cosine = cosine * z * z - 0.5f * z + 1.0f;
  const Floats y = (turns & 1) != 0 ? cosine : sine;
  return same_bits<Floats>(same_bits<Shorts>(y) ^ ((turns & 2) << 30));
}
ARK_INLINE bool any_of(Mask mask) {
  int32_t all = 0;
  for (int i = 0; i < kLanes; ++i) all |= mask[i];
  return all != 0;
}
ARK_INLINE Floats sin(Floats x) {
  if (any_of(~(abs(x) < kLargestAngle))) return lanewise(x, [](float one) { return __builtin_sinf(one); });
  return x == 0.0f ? x : sine_or_cosine(x, 0);  // sine_or_cosine() loses the sign of zero
}
ARK_INLINE Floats cos(Floats x) {
  if (any_of(~(abs(x) < kLargestAngle))) return lanewise(x, [](float one) { return __builtin_cosf(one); });
  return sine_or_cosine(x, 1);
}

// Rarely used: libm, lane by lane.
#define ARK_LANEWISE(name)                                                  \
  ARK_INLINE Floats name(Floats x) {                                        \
    return lanewise(x, [](float one) { return __builtin_##name##f(one); }); \
  }
ARK_LANEWISE(exp2)
ARK_LANEWISE(expm1)
ARK_LANEWISE(log2)
ARK_LANEWISE(log1p)
ARK_LANEWISE(tan)
ARK_LANEWISE(asin)
ARK_LANEWISE(acos)
ARK_LANEWISE(atan)
ARK_LANEWISE(cosh)
ARK_LANEWISE(asinh)
ARK_LANEWISE(acosh)
ARK_LANEWISE(atanh)
#undef ARK_LANEWISE
// The float versions are off by up to 2 ulp, PyTorch's are not.
#define ARK_LANEWISE_IN_DOUBLE(name)                                                                 \
  ARK_INLINE Floats name(Floats x) {                                                                 \
    return lanewise(x, [](float one) { return static_cast<float>(__builtin_##name(double{one})); }); \
  }
ARK_LANEWISE_IN_DOUBLE(log10)
ARK_LANEWISE_IN_DOUBLE(erfc)
ARK_LANEWISE_IN_DOUBLE(sinh)
#undef ARK_LANEWISE_IN_DOUBLE
ARK_INLINE Floats pow(Floats x, Floats y) {
  return lanewise(x, y, [](float base, float exponent) { return __builtin_powf(base, exponent); });
}
ARK_INLINE Floats atan2(Floats y, Floats x) {
  return lanewise(y, x, [](float one, float other) { return __builtin_atan2f(one, other); });
}
ARK_INLINE Floats fmod(Floats x, Floats y) {
  return lanewise(x, y, [](float one, float other) { return __builtin_fmodf(one, other); });
}

}  // namespace ark::cpu
