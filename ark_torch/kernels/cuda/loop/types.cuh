// Types of the loop kernel's device library: elements in memory, and the types in which threads compute.
//
// A plan's stages are emitted as the same text as for the CPU target (cpu/types.hpp): where that computes vectors of 16
// lanes, one thread computes one number here. So "Floats" is a float, and the library spreads columns over threads
// instead of lanes. Floating types compute in float32, integers in 64 bits, bool in bool. Elements are read by plain
// loads, which see other SMs' writes after the acquire of a wait (loop.cuh); only parameters may be read through the
// read-only path.
#pragma once

#include "protocol/base.hpp"

namespace ark::loop {

#if defined(__CUDACC_RTC__)
using int64_t = long long;
using int32_t = int;
using uint64_t = unsigned long long;
using uint32_t = unsigned int;
using uint16_t = unsigned short;
using uint8_t = unsigned char;
using int8_t = signed char;
#endif

#if defined(__CUDACC__)

#define ARK_LOOP __device__ __forceinline__

using Floats = float;
using Ints = int64_t;
using Mask = bool;

// Element types that C++ lacks.
struct bf16 {
  uint16 bits;
};
struct f16 {
  uint16 bits;
};
struct e4m3 {
  uint8 bits;
};

inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);
inline constexpr float kNan = __builtin_bit_cast(float, 0x7fc00000u);
inline constexpr int64_t kLeastInt = -0x7fffffffffffffffll - 1, kGreatestInt = 0x7fffffffffffffffll;

template <class T>
inline constexpr bool kIsFloat = false;
template <>
inline constexpr bool kIsFloat<float> = true;
template <>
inline constexpr bool kIsFloat<bf16> = true;
template <>
inline constexpr bool kIsFloat<f16> = true;

template <class A, class B>
inline constexpr bool kSame = false;
template <class A>
inline constexpr bool kSame<A, A> = true;

ARK_LOOP constexpr Floats splat(float x) {
  return x;
}
ARK_LOOP constexpr Ints splat(int64_t x) {
  return x;
}
ARK_LOOP constexpr Mask splat(bool x) {
  return x;
}

// An operand, with the assumption that it is in global memory.
template <class T>
ARK_LOOP T* in_global(char* at) {
  __builtin_assume(__isGlobal(at));
  return reinterpret_cast<T*>(at);
}

// A pointer, with the assumption that it is a multiple of 16 bytes.
template <class T>
ARK_LOOP T* aligned(T* at) {
  __builtin_assume((bits_as<uint64>(at) & 15) == 0);
  return at;
}

// So many elements, loaded or stored as one.
template <class T, int kElements>
struct alignas(kElements * sizeof(T)) Together {
  T at[kElements];
};

// ---- Conversion of an element to the type that is computed with, and back

ARK_LOOP float widen(float x) {
  return x;
}
ARK_LOOP float widen(bf16 x) {
  return bits_as<float>(static_cast<uint32>(x.bits) << 16);
}
ARK_LOOP float widen(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
ARK_LOOP float widen(e4m3 x) {
  const uint32 magnitude = x.bits & 0x7fu;
  const float normal = bits_as<float>((magnitude << 20) + (120u << 23)), subnormal = magnitude * 0x1p-9f;
  const float number = magnitude == 0x7f ? kNan : magnitude < 8 ? subnormal : normal;
  return (x.bits & 0x80u) != 0 ? -number : number;
}
ARK_LOOP int64_t widen(int64_t x) {
  return x;
}
ARK_LOOP int64_t widen(int32_t x) {
  return x;
}
ARK_LOOP int64_t widen(int8_t x) {
  return x;
}
ARK_LOOP int64_t widen(uint8_t x) {
  return x;
}
ARK_LOOP bool widen(bool x) {
  return x;
}

// Two numbers as two 16-bit elements of type T, rounded to nearest even; the first is in the low half.
ARK_LOOP uint32 pack_two(float low, float high, bf16) {
  uint32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
ARK_LOOP uint32 pack_two(float low, float high, f16) {
  uint32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
// The same for one number, by the instruction for two, which is several times as fast as the one for one.
ARK_LOOP float narrow(float x, float) {
  return x;
}
ARK_LOOP bf16 narrow(float x, bf16 type) {
  return {static_cast<uint16>(pack_two(x, 0.0f, type))};
}
ARK_LOOP f16 narrow(float x, f16 type) {
  return {static_cast<uint16>(pack_two(x, 0.0f, type))};
}
// Of numbers that e4m3 has (round_e4m3 of math.cuh).
ARK_LOOP e4m3 narrow(float x, e4m3) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16 both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(0.0f), "f"(x));
  return {static_cast<uint8>(both)};
#else
  const uint32 bits = bits_as<uint32>(x), sign = bits >> 24 & 0x80u;
  const float magnitude = bits_as<float>(bits & 0x7fffffffu);
  const uint32 normal = (bits >> 20 & 0x7ffu) - (120u << 3), subnormal = static_cast<uint32>(magnitude * 512.0f);
  return {static_cast<uint8>(sign | (x != x ? 0x7fu : magnitude < 0x1p-6f ? subnormal : normal))};
#endif
}
ARK_LOOP int64_t narrow(int64_t x, int64_t) {
  return x;
}
ARK_LOOP int32_t narrow(int64_t x, int32_t) {
  return static_cast<int32_t>(x);
}
ARK_LOOP bool narrow(bool x, bool) {
  return x;
}

template <class T>
ARK_LOOP auto load_one(const T* from) {
  return widen(*from);
}
template <class T, class V>
ARK_LOOP void store_one(T* to, V x) {
  *to = narrow(x, T{});
}

// The in-order sum of kParts elements, `apart` elements apart. All loads are issued before the additions, or, to save
// registers, one by one.
template <int kParts, bool kTogether = true>
ARK_LOOP float load_parts(const float* from, int64_t apart) {
  float sum = *from;
  if constexpr (kTogether) {
    float others[kParts - 1];
    ARK_UNROLL for (int i = 1; i < kParts; ++i) others[i - 1] = from[i * apart];
    ARK_UNROLL for (int i = 1; i < kParts; ++i) sum += others[i - 1];
  } else {
    _Pragma("unroll 1") for (int i = 1; i < kParts; ++i) sum += from[i * apart];
  }
  return sum;
}

// Rounds to a narrower type, but keeps the wide one.
template <class V, class T>
ARK_LOOP V round_to(V x, T type) {
  return widen(narrow(x, type));
}

#else

#define ARK_LOOP inline

#endif

}  // namespace ark::loop
