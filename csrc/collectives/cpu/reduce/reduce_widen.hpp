// Converts unsigned 8- and 16-bit lanes to 32 bits and back, one register each. Private to the reduce_<isa>.cpp files.
//
// __builtin_convertvector would do, but on x86-64 GCC 12 moves each lane through memory for it, far slower for bytes.
// So x86-64 names its instructions. narrow requires lanes that fit and drops high bits that a sign may have left.
#pragma once

#include "reduce_lanes.hpp"

namespace ark::ARK_REDUCE_ISA {

using U16 = Vec<uint16_t, kLanes>;
using U8 = Vec<uint8_t, kLanes>;

#if ARK_REDUCE_BYTES == 64

// GCC 12's -Wmaybe-uninitialized warns about unmasked 512-bit intrinsics; an all-ones mask costs nothing.
ARK_INLINE I32 widen(U16 x) {
  return bits_as<I32>(_mm512_maskz_cvtepu16_epi32(0xffff, bits_as<__m256i>(x)));
}
ARK_INLINE I32 widen(U8 x) {
  return bits_as<I32>(_mm512_maskz_cvtepu8_epi32(0xffff, bits_as<__m128i>(x)));
}
template <class Raw>
ARK_INLINE Raw narrow(I32 x) {
  if constexpr (sizeof(Raw) == 32) {
    return bits_as<Raw>(_mm512_maskz_cvtepi32_epi16(0xffff, bits_as<__m512i>(x)));
  } else {
    return bits_as<Raw>(_mm512_maskz_cvtepi32_epi8(0xffff, bits_as<__m512i>(x)));
  }
}

#elif ARK_REDUCE_BYTES == 32

ARK_INLINE I32 widen(U16 x) {
  return bits_as<I32>(_mm256_cvtepu16_epi32(bits_as<__m128i>(x)));
}
ARK_INLINE I32 widen(U8 x) {
  return bits_as<I32>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bits_as<int64_t>(x))));
}
template <class Raw>
ARK_INLINE Raw narrow(I32 x) {
  const __m256i wide = bits_as<__m256i>(x & 0xffff);
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  if constexpr (sizeof(Raw) == 16) {
    return bits_as<Raw>(words);
  } else {
    return bits_as<Raw>(_mm_cvtsi128_si64(_mm_packus_epi16(words, words)));
  }
}

#elif defined(__SSE2__)

ARK_INLINE I32 widen(U16 x) {
  return bits_as<I32>(_mm_unpacklo_epi16(_mm_cvtsi64_si128(bits_as<int64_t>(x)), _mm_setzero_si128()));
}
ARK_INLINE I32 widen(U8 x) {
  const __m128i zero = _mm_setzero_si128();
  const __m128i bytes = _mm_cvtsi32_si128(bits_as<int32_t>(x));
  return bits_as<I32>(_mm_unpacklo_epi16(_mm_unpacklo_epi8(bytes, zero), zero));
}
template <class Raw>
ARK_INLINE Raw narrow(I32 x) {
  const __m128i wide = bits_as<__m128i>((x << 16) >> 16);  // SSE2 only packs signed lanes
  const __m128i words = _mm_packs_epi32(wide, wide);
  if constexpr (sizeof(Raw) == 8) {
    return bits_as<Raw>(_mm_cvtsi128_si64(words));
  } else {
    return bits_as<Raw>(_mm_cvtsi128_si32(_mm_packus_epi16(words, words)));
  }
}

#else

template <class Raw>
ARK_INLINE I32 widen(Raw x) {
  return __builtin_convertvector(x, I32);
}
template <class Raw>
ARK_INLINE Raw narrow(I32 x) {
  return __builtin_convertvector(x, Raw);
}

#endif

}  // namespace ark::ARK_REDUCE_ISA
