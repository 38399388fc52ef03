// Arithmetic and conversions of single elements, bit for bit those of csrc/collectives/reduce_*.hpp.
//
// Device code uses PTX with explicit rounding: add.rn.f32 is never fused into a multiply-add and never flushes
// denormals, whatever the compiler's options (-fmad, -ftz, -use_fast_math; __fadd_rn would still obey -ftz). For the
// same reason comparisons and NaN tests work on integers. Hardware conversions are used where they match; their NaNs
// (0x7fff) are then replaced by ours, the positive quiet NaN with an empty payload (bfloat16: 0x7fc0, float16: 0x7e00).
// The host forms need -ffp-contract=off if the target has fused multiply-adds.
#pragma once

#include "cuda/dtype.cuh"

namespace ark::device {

inline constexpr uint32 kNan32 = 0x7fc00000;
inline constexpr uint64 kNan64 = 0x7ff8000000000000;

#if ARK_DEVICE_CODE
#define ARK_ARITHMETIC(T, name, symbol, ptx, reg)               \
  ARK_DEVICE_INLINE T name(T a, T b) {                          \
    T result;                                                   \
    asm(ptx " %0, %1, %2;" : "=" reg(result) : reg(a), reg(b)); \
    return result;                                              \
  }
#else
#define ARK_ARITHMETIC(T, name, symbol, ptx, reg) \
  ARK_DEVICE_INLINE T name(T a, T b) {            \
    return a symbol b;                            \
  }
#endif
ARK_ARITHMETIC(float, add, +, "add.rn.f32", "f")
ARK_ARITHMETIC(float, subtract, -, "sub.rn.f32", "f")
ARK_ARITHMETIC(float, multiply, *, "mul.rn.f32", "f")
ARK_ARITHMETIC(float, divide, /, "div.rn.f32", "f")
ARK_ARITHMETIC(double, add, +, "add.rn.f64", "d")
ARK_ARITHMETIC(double, subtract, -, "sub.rn.f64", "d")
ARK_ARITHMETIC(double, multiply, *, "mul.rn.f64", "d")
ARK_ARITHMETIC(double, divide, /, "div.rn.f64", "d")
#undef ARK_ARITHMETIC

// x * y + z, rounded once.
ARK_DEVICE_INLINE float multiply_add(float x, float y, float z) {
#if ARK_DEVICE_CODE
  float result;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(x), "f"(y), "f"(z));
  return result;
#else
  return __builtin_fmaf(x, y, z);
#endif
}

ARK_DEVICE_INLINE void round_to(float& to, double x) {
#if ARK_DEVICE_CODE
  asm("cvt.rn.f32.f64 %0, %1;" : "=f"(to) : "d"(x));
#else
  to = static_cast<float>(x);
#endif
}
ARK_DEVICE_INLINE void round_to(double& to, double x) {
  to = x;
}

ARK_DEVICE_INLINE bool is_nan(float x) {
  return (bits_as<uint32>(x) & 0x7fffffff) > 0x7f800000;
}
ARK_DEVICE_INLINE bool is_nan(double x) {
  return (bits_as<uint64>(x) & ~(1ull << 63)) > 0x7ff0000000000000;
}
ARK_DEVICE_INLINE float canonical(float x) {
  return is_nan(x) ? bits_as<float>(kNan32) : x;
}
ARK_DEVICE_INLINE double canonical(double x) {
  return is_nan(x) ? bits_as<double>(kNan64) : x;
}

// Maps floats to integers in the same order, with -0 below +0.
ARK_DEVICE_INLINE int order_of(float x) {
  const int bits = bits_as<int>(x);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}
ARK_DEVICE_INLINE long long order_of(double x) {
  const long long bits = bits_as<long long>(x);
  return bits < 0 ? bits ^ 0x7fffffffffffffff : bits;
}

// x / ranks. The reciprocal of a power of two is exact, so product and quotient are equal before the one rounding, and
// the product takes a fifth of the instructions.
ARK_DEVICE_INLINE float divide_by_ranks(float x, int ranks) {
  const float divisor = static_cast<float>(ranks);
  if ((ranks & (ranks - 1)) == 0) return multiply(x, bits_as<float>(0x7f000000 - bits_as<int>(divisor)));
  return divide(x, divisor);
}
ARK_DEVICE_INLINE double divide_by_ranks(double x, int ranks) {
  return divide(x, static_cast<double>(ranks));
}

ARK_DEVICE_INLINE float decode_small(const SmallFloat& f, uint32 code) {
  const int shift = 23 - f.mantissa, sign_at = f.exponent + f.mantissa;
  const uint32 magnitude = code & ((1u << sign_at) - 1);
  uint32 bits = (magnitude << shift) + (static_cast<uint32>(127 - f.bias) << 23);
  if (magnitude < 1u << f.mantissa) {
    const float last_place = bits_as<float>((128 - f.bias - f.mantissa) << 23);
    bits = bits_as<uint32>(multiply(static_cast<float>(magnitude), last_place));
  }
  if (f.infinities && magnitude >= f.overflow) bits = (magnitude << shift) | 0x7f800000;
  if (!f.infinities && (f.negative_zero ? magnitude : code) == f.nan) bits = kNan32;
  return bits_as<float>(bits | (code >> sign_at) << 31);
}

ARK_DEVICE_INLINE uint32 encode_small(const SmallFloat& f, float x) {
  const int shift = 23 - f.mantissa, sign_at = f.exponent + f.mantissa;
  const uint32 bits = bits_as<uint32>(x), magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return f.nan;
  uint32 code;
  if (magnitude < static_cast<uint32>(128 - f.bias) << 23) {                    // below the smallest normal value
    const uint32 magic = static_cast<uint32>(151 - f.bias - f.mantissa) << 23;  // a number whose last bit has the
                                                                                // weight of the code's
    code = bits_as<uint32>(add(bits_as<float>(magnitude), bits_as<float>(magic))) - magic;
  } else {
    const uint32 odd = (magnitude >> shift) & 1;
    code = (magnitude - (static_cast<uint32>(127 - f.bias) << 23) + ((1u << (shift - 1)) - 1) + odd) >> shift;
    if (code > f.overflow) code = f.overflow;
  }
  if (!f.negative_zero && (code == 0 || code == f.nan)) return code;
  return code | (bits >> 31) << sign_at;
}

ARK_DEVICE_INLINE float decode_scale(uint32 code) {  // e8m0fnu: 2^(code - 127)
  return bits_as<float>(code == 0 ? 0x00400000u : code == 255 ? kNan32 : code << 23);
}
// Drops the sign. Ties round up, except below the smallest normal float32.
ARK_DEVICE_INLINE uint32 encode_scale(float x) {
  const uint32 any = bits_as<uint32>(x) & 0x7fffffff;
  const uint32 magnitude = any < 0x7f800000 ? any : 0x7f800000;
  return (magnitude + 0x3fffff + (magnitude >= 0x800000 ? 1 : 0)) >> 23;
}

ARK_DEVICE_INLINE uint32 encode_bf16(float x) {
  const uint32 bits = bits_as<uint32>(canonical(x));
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// Replaces the hardware's NaN, 0x7fff, in two halves of a word; `excess` is its distance from ours. Adding one carries
// into a half's sign bit for that code only.
ARK_DEVICE_INLINE uint32 replace_nans(uint32 halves, uint32 excess) {
  const uint32 nans = (halves + 0x00010001) & ~halves & 0x80008000;
  return halves - (nans >> 15) * excess;
}

// Pairs of 16-bit floats in a word, the first one low.
ARK_DEVICE_INLINE void decode_bf16_pair(uint32 word, float& low, float& high) {
  low = bits_as<float>(word << 16);
  high = bits_as<float>(word & 0xffff0000);
}
ARK_DEVICE_INLINE uint32 encode_bf16_pair(float low, float high) {
#if ARK_DEVICE_CODE
  uint32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return replace_nans(word, 0x7fff - 0x7fc0);
#else
  return encode_bf16(low) | encode_bf16(high) << 16;
#endif
}
ARK_DEVICE_INLINE void decode_f16_pair(uint32 word, float& low, float& high) {
#if ARK_DEVICE_CODE
  asm("cvt.f32.f16 %0, %1;" : "=f"(low) : "h"(static_cast<uint16>(word)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(high) : "h"(static_cast<uint16>(word >> 16)));
#else
  low = decode_small(layout_of(DType::f16), word & 0xffff);
  high = decode_small(layout_of(DType::f16), word >> 16);
#endif
}
ARK_DEVICE_INLINE uint32 encode_f16_pair(float low, float high) {
#if ARK_DEVICE_CODE
  uint32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return replace_nans(word, 0x7fff - 0x7e00);
#else
  constexpr SmallFloat f16 = layout_of(DType::f16);
  return encode_small(f16, low) | encode_small(f16, high) << 16;
#endif
}

#if ARK_DEVICE_CODE
// Round numbers that are computed with again: NaNs stay any NaN.
ARK_DEVICE_INLINE void round_bf16_pair(float& low, float& high) {
  uint32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  decode_bf16_pair(word, low, high);
}
ARK_DEVICE_INLINE void round_f16_pair(float& low, float& high) {
  uint32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  decode_f16_pair(word, low, high);
}
#endif

}  // namespace ark::device
