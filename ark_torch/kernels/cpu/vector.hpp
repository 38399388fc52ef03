// Loads and stores of 16-lane vectors from and to every element type: whole or only the first lanes, contiguous,
// strided or broadcast.
//
// Rounding is to nearest even; NaN stays NaN (quiet). Lanes that do not count are loaded as zero without reading
// memory, and never written: a tail may end at the last byte of a page.
#pragma once

#include "cpu/types.hpp"

namespace ark::cpu {

// ---- Conversions between elements and lanes

ARK_INLINE Floats widen(Halves bits, bf16) {
  return same_bits<Floats>(__builtin_convertvector(bits, Words) << 16);
}
ARK_INLINE Halves narrow(Floats x, bf16) {
  const Words bits = same_bits<Words>(x);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words nan = (bits >> 16) | 0x40u;
  return __builtin_convertvector(same_bits<Words>(x != x) ? nan : rounded, Halves);
}

#if defined(__AVX512F__)
ARK_INLINE Floats widen(Halves bits, f16) {
  return same_bits<Floats>(_mm512_cvtph_ps(same_bits<__m256i>(bits)));
}
ARK_INLINE Halves narrow(Floats x, f16) {
  return same_bits<Halves>(_mm512_cvtps_ph(same_bits<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__F16C__)
using HalfFloats = float __attribute__((vector_size(32)));
using HalfHalves = int16_t __attribute__((vector_size(16)));
inline constexpr int kToNearest = 0;  // ties to even
static_assert(kLanes == 8);
ARK_INLINE Floats widen(Halves bits, f16) {
  return same_bits<Floats>(__builtin_ia32_vcvtph2ps256(same_bits<HalfHalves>(bits)));
}
ARK_INLINE Halves narrow(Floats x, f16) {
  return same_bits<Halves>(__builtin_ia32_vcvtps2ph256(same_bits<HalfFloats>(x), kToNearest));
}
#else
// The exponent bias is 127 for float, 15 for half. Multiplying by 2^112 converts between them, including subnormals.
ARK_INLINE Floats widen(Halves bits, f16) {
  const Words wide = __builtin_convertvector(bits, Words);
  const Words magnitude = (wide & 0x7fffu) << 13;
  const Floats scaled = same_bits<Floats>(magnitude) * 0x1p112f;
  const Words special = magnitude | 0x7f800000u;  // infinities and NaN keep their significand
  const Words value = same_bits<Words>((wide & 0x7c00u) == 0x7c00u) ? special : same_bits<Words>(scaled);
  return same_bits<Floats>(value | ((wide & 0x8000u) << 16));
}
ARK_INLINE Halves narrow(Floats x, f16) {
  const Words bits = same_bits<Words>(x);
  const Words sign = (bits >> 16) & 0x8000u;
  const Words magnitude = bits & 0x7fffffffu;
  // Normal halves: drop 13 bits, rounded to even, and adjust the exponent; what rounds above 65504 becomes infinity.
  const Words normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  // Subnormal halves: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits.
  const Words small = same_bits<Words>(same_bits<Floats>(magnitude) + 0.5f) - 0x3f000000u;
  Words half = magnitude < 0x38800000u ? small : normal;
  half = magnitude >= 0x47800000u ? Words{} + 0x7c00u : half;
  half = magnitude > 0x7f800000u ? ((magnitude >> 13) & 0x3ffu) | 0x7e00u : half;
  return __builtin_convertvector(half | sign, Halves);
}
#endif

// Of numbers that e4m3 has (round_e4m3 of math.hpp). A subnormal number is a multiple of 2^-9.
ARK_INLINE Bytes narrow(Floats x, e4m3) {
  const Words bits = same_bits<Words>(x), magnitude = bits & 0x7fffffffu;
  const Words subnormal = same_bits<Words>(__builtin_convertvector(same_bits<Floats>(magnitude) * 512.0f, Shorts));
  Words code = magnitude < 0x3c800000u ? subnormal : (magnitude >> 20) - (120u << 3);
  code = magnitude > 0x7f800000u ? Words{} + 0x7fu : code;
  return __builtin_convertvector(code | (bits >> 24 & 0x80u), Bytes);
}

// ---- One element

ARK_INLINE float load_one(const float* p) {
  return *p;
}
ARK_INLINE float load_one(const bf16* p) {
  return same_bits<float>(static_cast<uint32_t>(p->bits) << 16);
}
ARK_INLINE float load_one(const f16* p) {
  return widen(Halves{p->bits}, f16{})[0];
}
ARK_INLINE float load_one(const e4m3* p) {
  const uint32_t magnitude = p->bits & 0x7fu;
  const float normal = same_bits<float>((magnitude << 20) + (120u << 23));
  const float number = magnitude == 0x7f ? kNan : magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f : normal;
  return (p->bits & 0x80u) != 0 ? -number : number;
}
ARK_INLINE int64_t load_one(const int64_t* p) {
  return *p;
}
ARK_INLINE int64_t load_one(const int32_t* p) {
  return *p;
}
ARK_INLINE int64_t load_one(const int8_t* p) {
  return *p;
}
ARK_INLINE int64_t load_one(const uint8_t* p) {
  return *p;
}
// Any byte but 0 is true, as in PyTorch.
ARK_INLINE bool load_one(const bool* p) {
  return *reinterpret_cast<const uint8_t*>(p) != 0;
}

ARK_INLINE void store_one(float* p, float x) {
  *p = x;
}
ARK_INLINE void store_one(bf16* p, float x) {
  p->bits = narrow(splat(x), bf16{})[0];
}
ARK_INLINE void store_one(f16* p, float x) {
  p->bits = narrow(splat(x), f16{})[0];
}
ARK_INLINE void store_one(e4m3* p, float x) {
  p->bits = narrow(splat(x), e4m3{})[0];
}
ARK_INLINE void store_one(int64_t* p, int64_t x) {
  *p = x;
}
ARK_INLINE void store_one(int32_t* p, int64_t x) {
  *p = static_cast<int32_t>(x);
}
ARK_INLINE void store_one(bool* p, bool x) {
  *p = x;
}

// ---- Sixteen contiguous elements

// 16 contiguous elements of T as a vector, and the lanes that they become.
ARK_INLINE Floats to_lanes(Floats raw, float) {
  return raw;
}
ARK_INLINE Floats to_lanes(Halves raw, bf16 type) {
  return widen(raw, type);
}
ARK_INLINE Floats to_lanes(Halves raw, f16 type) {
  return widen(raw, type);
}
ARK_INLINE Ints to_lanes(Ints raw, int64_t) {
  return raw;
}
ARK_INLINE Ints to_lanes(Shorts raw, int32_t) {
  return __builtin_convertvector(raw, Ints);
}
ARK_INLINE Mask to_lanes(Bytes raw, bool) {
  return __builtin_convertvector(raw, Shorts) != 0;
}
ARK_INLINE Floats to_raw(Floats x, float) {
  return x;
}
ARK_INLINE Halves to_raw(Floats x, bf16 type) {
  return narrow(x, type);
}
ARK_INLINE Halves to_raw(Floats x, f16 type) {
  return narrow(x, type);
}
ARK_INLINE Bytes to_raw(Floats x, e4m3 type) {
  return narrow(x, type);
}
ARK_INLINE Ints to_raw(Ints x, int64_t) {
  return x;
}
ARK_INLINE Shorts to_raw(Ints x, int32_t) {
  return __builtin_convertvector(x, Shorts);
}
ARK_INLINE Bytes to_raw(Mask x, bool) {
  return __builtin_convertvector(x & 1, Bytes);
}

template <class T>
struct RawOf;
template <>
struct RawOf<float> {
  using type = Floats;
};
template <>
struct RawOf<bf16> {
  using type = Halves;
};
template <>
struct RawOf<f16> {
  using type = Halves;
};
template <>
struct RawOf<e4m3> {
  using type = Bytes;
};
template <>
struct RawOf<int64_t> {
  using type = Ints;
};
template <>
struct RawOf<int32_t> {
  using type = Shorts;
};
template <>
struct RawOf<bool> {
  using type = Bytes;
};
template <class T>
using Raw = typename RawOf<T>::type;

template <class T>
ARK_INLINE auto load(const T* p, All) {
  Raw<T> raw;
  std::memcpy(&raw, p, sizeof(raw));
  return to_lanes(raw, T{});
}
template <class T>
ARK_INLINE auto load(const T* p, First lanes) {
  Raw<T> raw{};
  std::memcpy(&raw, p, static_cast<size_t>(lanes.count) * sizeof(T));
  return to_lanes(raw, T{});
}
template <class T, class Lanes>
ARK_INLINE void store(T* p, Lanes x, All) {
  const Raw<T> raw = to_raw(x, T{});
  std::memcpy(p, &raw, sizeof(raw));
}
template <class T, class Lanes>
ARK_INLINE void store(T* p, Lanes x, First lanes) {
  const Raw<T> raw = to_raw(x, T{});
  std::memcpy(p, &raw, static_cast<size_t>(lanes.count) * sizeof(T));
}

#if defined(__AVX512F__)
// Tails of float are frequent: heads of 40 or 80, vocabularies.
ARK_INLINE Floats load(const float* p, First lanes) {
  return same_bits<Floats>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << lanes.count) - 1), p));
}
ARK_INLINE void store(float* p, Floats x, First lanes) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << lanes.count) - 1), same_bits<__m512>(x));
}
#endif

// ---- Stores past all caches, for data that is not read before as much else has passed as the caches hold

// Orders stores past the caches before the release that publishes them: on x86 only an explicit fence does that.
ARK_INLINE void end_stores_past() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

#if defined(__x86_64__)
#if defined(__AVX512F__)
inline constexpr int kPastBytes = 64;
#elif defined(__AVX__)
inline constexpr int kPastBytes = 32;
#else
inline constexpr int kPastBytes = 16;
#endif
#if defined(__clang__)
#define ARK_STORE_PAST(builtin, to, piece) __builtin_nontemporal_store(piece, reinterpret_cast<decltype(piece)*>(to))
#else
#define ARK_STORE_PAST(builtin, to, piece) builtin(reinterpret_cast<float*>(to), piece)
#endif
// To a multiple of kBytes.
template <int kBytes>
ARK_INLINE void store_piece_past(char* to, const char* from) {
  if constexpr (kBytes == 16) {
    float __attribute__((vector_size(16))) piece;
    std::memcpy(&piece, from, kBytes);
    ARK_STORE_PAST(__builtin_ia32_movntps, to, piece);
  }
#if defined(__AVX__)
  if constexpr (kBytes == 32) {
    float __attribute__((vector_size(32))) piece;
    std::memcpy(&piece, from, kBytes);
    ARK_STORE_PAST(__builtin_ia32_movntps256, to, piece);
  }
#endif
#if defined(__AVX512F__)
  if constexpr (kBytes == 64) {
    float __attribute__((vector_size(64))) piece;
    std::memcpy(&piece, from, kBytes);
    ARK_STORE_PAST(__builtin_ia32_movntps512, to, piece);
  }
#endif
}
#undef ARK_STORE_PAST
template <class T, class Lanes>
ARK_INLINE void store_past(T* p, Lanes x, All) {
  constexpr int kSize = sizeof(Raw<T>), kPiece = kSize < kPastBytes ? kSize : kPastBytes;
  const Raw<T> raw = to_raw(x, T{});
  if (kPiece < 16 || reinterpret_cast<uintptr_t>(p) % kPiece != 0) {
    std::memcpy(p, &raw, sizeof(raw));
    return;
  }
  char bytes[kSize];
  std::memcpy(bytes, &raw, kSize);
  for (int at = 0; at < kSize; at += kPiece) store_piece_past<kPiece>(reinterpret_cast<char*>(p) + at, bytes + at);
}
#else
template <class T, class Lanes>
ARK_INLINE void store_past(T* p, Lanes x, All lanes) {
  store(p, x, lanes);
}
#endif
template <class T, class Lanes>
ARK_INLINE void store_past(T* p, Lanes x, First lanes) {
  store(p, x, lanes);
}

// ---- Strided elements

ARK_INLINE constexpr int count_of(All) {
  return kLanes;
}
ARK_INLINE constexpr int count_of(First lanes) {
  return lanes.count;
}

template <class T, class Count>
ARK_INLINE auto load_strided(const T* p, int64_t stride, Count lanes) {
  T elements[kLanes] = {};
  for (int i = 0; i < count_of(lanes); ++i) std::memcpy(&elements[i], &p[i * stride], sizeof(T));
  return load(elements, All{});
}
template <class T, class Lanes, class Count>
ARK_INLINE void store_strided(T* p, int64_t stride, Lanes x, Count lanes) {
  T elements[kLanes];
  store(elements, x, All{});
  for (int i = 0; i < count_of(lanes); ++i) std::memcpy(&p[i * stride], &elements[i], sizeof(T));
}

// ---- Loops over columns

// Calls body(column, lanes) for 16 columns at a time, and once for the rest.
template <class Body>
ARK_INLINE void for_columns(int64_t begin, int64_t end, Body&& body) {
  int64_t column = begin;
  for (; column + kLanes <= end; column += kLanes) body(column, All{});
  if (column < end) body(column, First{static_cast<int>(end - column)});
}

}  // namespace ark::cpu
