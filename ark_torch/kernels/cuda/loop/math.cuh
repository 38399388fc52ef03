// Elementary functions of one float32 number.
//
// They are CUDA's own where these are within about 2 ulp (expf 1, logf 1, tanhf 1, erff 2 by the manual; powf, erfcf
// and the inverse hyperbolic ones 3 or 4, as in PyTorch on a GPU). expf is a range reduction in two fused steps and one
// ex2, so nothing could be faster. Sine, cosine and tangent are implemented here, since CUDA's keep an array in local
// memory for large angles.
#pragma once

#include "cuda/loop/types.cuh"

namespace ark::loop {

#define ARK_CUDA_FUNCTION(name)    \
  ARK_LOOP Floats name(Floats x) { \
    return ::name##f(x);           \
  }
ARK_CUDA_FUNCTION(exp)
ARK_CUDA_FUNCTION(exp2)
ARK_CUDA_FUNCTION(expm1)
ARK_CUDA_FUNCTION(log)
ARK_CUDA_FUNCTION(log2)
ARK_CUDA_FUNCTION(log10)
ARK_CUDA_FUNCTION(log1p)
ARK_CUDA_FUNCTION(sqrt)
ARK_CUDA_FUNCTION(tanh)
ARK_CUDA_FUNCTION(erf)
ARK_CUDA_FUNCTION(erfc)
ARK_CUDA_FUNCTION(asin)
ARK_CUDA_FUNCTION(acos)
ARK_CUDA_FUNCTION(atan)
ARK_CUDA_FUNCTION(sinh)
ARK_CUDA_FUNCTION(cosh)
ARK_CUDA_FUNCTION(asinh)
ARK_CUDA_FUNCTION(acosh)
ARK_CUDA_FUNCTION(atanh)
ARK_CUDA_FUNCTION(floor)
ARK_CUDA_FUNCTION(ceil)
ARK_CUDA_FUNCTION(trunc)
#undef ARK_CUDA_FUNCTION

ARK_LOOP Floats rsqrt(Floats x) {
  return 1.0f / ::sqrtf(x);
}
// Rounds halves to even.
ARK_LOOP Floats round(Floats x) {
  return ::rintf(x);
}
ARK_LOOP Floats abs(Floats x) {
  return ::fabsf(x);
}
// The magnitude of x with the sign of y.
ARK_LOOP Floats copysign(Floats x, Floats y) {
  return ::copysignf(x, y);
}
// To the nearest float8_e4m3fn, halves to even, as PyTorch's conversion: what exceeds 464 becomes NaN.
ARK_LOOP Floats round_e4m3(Floats x) {
  const float magnitude = ::fabsf(x);
  const unsigned bits = __float_as_uint(magnitude);
  const float normal = __uint_as_float((bits + 0x7ffffu + (bits >> 20 & 1u)) & 0xfff00000u);
  const float magic = 0x1.8p14f;  // adding it leaves a multiple of the least subnormal number, 2^-9
  const float subnormal = __fsub_rn(__fadd_rn(magnitude, magic), magic);
  return ::copysignf(magnitude <= 464.0f ? (magnitude < 0x1p-6f ? subnormal : normal) : kNan, x);
}
ARK_LOOP Floats pow(Floats x, Floats y) {
  return ::powf(x, y);
}
ARK_LOOP Floats atan2(Floats y, Floats x) {
  return ::atan2f(y, x);
}
ARK_LOOP Floats fmod(Floats x, Floats y) {
  return ::fmodf(x, y);
}
ARK_LOOP Floats sigmoid(Floats x) {
  const Floats e = exp(-abs(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

// 1 + erf(x) within 5e-7, for results that keep 16 bits. For negative x (a GELU's tail) the relative error is 1/1,500
// down to x = -3, and 1/400 to -3.9. Takes half as many instructions as CUDA's erf (Abramowitz and Stegun, Handbook of
// Mathematical Functions, 7.1.26, which approximates 1 - erf).
ARK_LOOP Floats one_plus_erf_for_halves(Floats x) {
  float t, power;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(__fmaf_rn(0.3275911f, ::fabsf(x), 1.0f)));
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f * x));
  float y = __fmaf_rn(1.061405429f, t, -1.453152027f);
  y = __fmaf_rn(y, t, 1.421413741f);
  y = __fmaf_rn(y, t, -0.284496736f);
  y = __fmaf_rn(y, t, 0.254829592f);
  const float rest = y * t * power;
  return x < 0.0f ? rest : 2.0f - rest;
}

// ---- Functions of angles

// x = turns * pi/2 + rest, |rest| <= pi/4. Computed in double, so that rotary embeddings keep all bits at any position.
struct Quarter {
  float rest;
  int turns;  // modulo 4
};

// The fraction of 2/pi in words; the first word, 0, is the integer part.
static __constant__ uint32 kTwoOverPi[8] = {0,           0xa2f9836eu, 0x4e441529u, 0xfc2757d1u,
                                            0xf534ddc0u, 0xdb629599u, 0x3c439041u, 0xfe5163abu};

// For angles of 2^20 and more: the part of 2/pi times x that matters modulo 4, as a 96-bit number (Payne and Hanek).
ARK_LOOP Quarter quarter_turns_far(float x) {
  const uint32 bits = bits_as<uint32>(x);
  const int exponent = static_cast<int>(bits >> 23 & 0xff) - 150;  // x = m 2^exponent, exponent >= -3
  if (exponent == 105) return {kNan, 0};                           // infinite or NaN
  const uint64 m = bits & 0x7fffffu | 0x800000u;
  // The 96 bits whose first one, bit `first` of the table, has the weight 2 after multiplication by 2^exponent.
  const int first = exponent + 30, word = first >> 5, shift = first & 31;
  const uint32 a = __funnelshift_l(kTwoOverPi[word + 1], kTwoOverPi[word], shift),
               b = __funnelshift_l(kTwoOverPi[word + 2], kTwoOverPi[word + 1], shift),
               c = __funnelshift_l(kTwoOverPi[word + 3], kTwoOverPi[word + 2], shift);
  const uint64 low = m * c, high = (m * a << 32) + m * b + (low >> 32);
  const int64_t part = static_cast<int64_t>(high << 2 | (low & 0xffffffffu) >> 30);  // of a quarter turn, times 2^64
  const int turns = static_cast<int>(high >> 62) + (part < 0 ? 1 : 0);
  const float rest = static_cast<float>(static_cast<double>(part) * (1.57079632679489661923 * 0x1p-64));
  return x < 0.0f ? Quarter{-rest, -turns} : Quarter{rest, turns};
}

ARK_LOOP Quarter quarter_turns(float x) {
  if (!(::fabsf(x) < 0x1p20f)) return quarter_turns_far(x);
  const double wide = x, magic = 0x1.8p52;
  const double shifted = __fma_rn(wide, 0.63661977236758134308, magic), n = shifted - magic;
  const double rest = __fma_rn(n, -0x1.1a62633145c07p-54, __fma_rn(n, -0x1.921fb54442d18p+0, wide));
  return {static_cast<float>(rest), static_cast<int>(bits_as<int64_t>(shifted))};
}

ARK_LOOP Floats sine_or_cosine(Floats x, int quarter) {
  const Quarter q = quarter_turns(x);
  const int turns = q.turns + quarter;
  const float r = q.rest, z = r * r;
  float y;
  if ((turns & 1) != 0) {
    y = __fmaf_rn(2.443315711809948e-5f, z, -1.388731625493765e-3f);
    y = __fmaf_rn(y, z, 4.166664568298827e-2f);
    y = __fmaf_rn(y * z, z, __fmaf_rn(-0.5f, z, 1.0f));
  } else {
    y = __fmaf_rn(-1.9515295891e-4f, z, 8.3321608736e-3f);
    y = __fmaf_rn(y, z, -1.6666654611e-1f);
    y = __fmaf_rn(y * z, r, r);
  }
  return (turns & 2) != 0 ? -y : y;
}
ARK_LOOP Floats sin(Floats x) {
  return x == 0.0f ? x : sine_or_cosine(x, 0);
}
ARK_LOOP Floats cos(Floats x) {
  return sine_or_cosine(x, 1);
}
// The polynomial is from Cephes.
ARK_LOOP Floats tan(Floats x) {
  const Quarter q = quarter_turns(x);
  const float r = q.rest, z = r * r;
  float y = __fmaf_rn(9.38540185543e-3f, z, 3.11992232697e-3f);
  y = __fmaf_rn(y, z, 2.44301354525e-2f);
  y = __fmaf_rn(y, z, 5.34112807005e-2f);
  y = __fmaf_rn(y, z, 1.33387994085e-1f);
  y = __fmaf_rn(y, z, 3.33331568548e-1f);
  y = __fmaf_rn(y * z, r, r);
  return (q.turns & 1) != 0 ? -1.0f / y : y;
}

}  // namespace ark::loop
