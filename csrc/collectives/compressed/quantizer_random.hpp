// Philox4x32-10 in vectors, one counter per lane. Private to quantizer_<isa>.cpp.
//
// A counter's 128 bits give the chances of eight adjacent elements. The lanes order counters so that interleaving the
// four result words within 128 bits puts the chances in element order.
#pragma once

#include "collectives/cpu/reduce/reduce_lanes.hpp"
#include "protocol/quantize.hpp"

namespace ark::ARK_REDUCE_ISA::quantizer {

using U32 = Vec<uint32_t, kLanes>;
using U64 = Vec<uint64_t, kLanes / 2>;

inline constexpr int kChains = 2;  // independent chains, because each round depends on the previous one
inline constexpr int kRandomElements = kChains * 8 * kLanes;  // per call

#if defined(__x86_64__)

#if ARK_REDUCE_BYTES == 64
using Register = __m512i;
#define ARK_WIDE(name) _mm512_##name
#elif ARK_REDUCE_BYTES == 32
using Register = __m256i;
#define ARK_WIDE(name) _mm256_##name
#else
using Register = __m128i;
#define ARK_WIDE(name) _mm_##name
#endif

ARK_INLINE U64 even_product(U64 a, U64 b) {  // products of the low halves
#if ARK_REDUCE_BYTES == 64
  return bits_as<U64>(_mm512_maskz_mul_epu32(0xff, bits_as<__m512i>(a), bits_as<__m512i>(b)));
#else
  return bits_as<U64>(ARK_WIDE(mul_epu32)(bits_as<Register>(a), bits_as<Register>(b)));
#endif
}
ARK_INLINE void multiply(U32 a, uint32_t b, U32& low, U32& high) {
  const U64 factor = U64{} + b, pairs = bits_as<U64>(a);
  const U64 even = even_product(pairs, factor), odd = even_product(pairs >> 32, factor);
  low = bits_as<U32>((even & 0xffffffffu) | (odd << 32));
  high = bits_as<U32>((even >> 32) | (odd & 0xffffffff00000000u));
}
#if ARK_REDUCE_BYTES == 64
#define ARK_INTERLEAVE(kind, mask, a, b) \
  bits_as<U32>(_mm512_maskz_##kind(mask, bits_as<__m512i>(a), bits_as<__m512i>(b)))
#define ARK_INTERLEAVE_32(half, a, b) ARK_INTERLEAVE(unpack##half##_epi32, 0xffff, a, b)
#define ARK_INTERLEAVE_64(half, a, b) ARK_INTERLEAVE(unpack##half##_epi64, 0xff, a, b)
#else
#define ARK_INTERLEAVE(kind, a, b) bits_as<U32>(ARK_WIDE(kind)(bits_as<Register>(a), bits_as<Register>(b)))
#define ARK_INTERLEAVE_32(half, a, b) ARK_INTERLEAVE(unpack##half##_epi32, a, b)
#define ARK_INTERLEAVE_64(half, a, b) ARK_INTERLEAVE(unpack##half##_epi64, a, b)
#endif

// Chances of elements [8 * group, 8 * group + kRandomElements) of a bucket.
inline __attribute__((noinline)) void chances(const quantize::Rule& rule, uint32_t bucket, uint32_t group,
                                              uint16_t* to) {
  U32 lanes = {};
  for (uint32_t lane = 0; lane < kLanes; ++lane) lanes[lane] = lane % 4 * (kLanes / 4) + lane / 4;
  U32 c0[kChains], c1[kChains], c2[kChains], c3[kChains];
#pragma GCC unroll 2
  for (int i = 0; i < kChains; ++i) {
    c0[i] = lanes + (group + static_cast<uint32_t>(i * kLanes)), c1[i] = U32{} + bucket, c2[i] = U32{} + rule.rank;
    c3[i] = U32{} + static_cast<uint32_t>(rule.stage);
  }
  uint32_t k0 = static_cast<uint32_t>(rule.seed), k1 = static_cast<uint32_t>(rule.seed >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < quantize::kPhiloxRounds; ++round) {
#pragma GCC unroll 2
    for (int i = 0; i < kChains; ++i) {
      U32 low_a, high_a, low_b, high_b;
      multiply(c0[i], quantize::kPhiloxA, low_a, high_a);
      multiply(c2[i], quantize::kPhiloxB, low_b, high_b);
      c0[i] = high_b ^ c1[i] ^ k0, c2[i] = high_a ^ c3[i] ^ k1, c1[i] = low_b, c3[i] = low_a;
    }
    k0 += quantize::kWeylA, k1 += quantize::kWeylB;
  }
#pragma GCC unroll 2
  for (int i = 0; i < kChains; ++i) {
    const U32 a = ARK_INTERLEAVE_32(lo, c0[i], c1[i]), b = ARK_INTERLEAVE_32(hi, c0[i], c1[i]);
    const U32 c = ARK_INTERLEAVE_32(lo, c2[i], c3[i]), d = ARK_INTERLEAVE_32(hi, c2[i], c3[i]);
    const U32 ordered[4] = {ARK_INTERLEAVE_64(lo, a, c), ARK_INTERLEAVE_64(hi, a, c), ARK_INTERLEAVE_64(lo, b, d),
                            ARK_INTERLEAVE_64(hi, b, d)};
    __builtin_memcpy(to + i * 8 * kLanes, ordered, sizeof(ordered));
  }
}

#undef ARK_INTERLEAVE_32
#undef ARK_INTERLEAVE_64
#undef ARK_INTERLEAVE
#undef ARK_WIDE

#else

inline __attribute__((noinline)) void chances(const quantize::Rule& rule, uint32_t bucket, uint32_t group,
                                              uint16_t* to) {
  for (uint32_t g = 0; g < kRandomElements / 8; ++g) {
    const quantize::Random random = quantize::random_of(rule, bucket, group + g);
    for (uint32_t i = 0; i < 8; ++i) to[8 * g + i] = static_cast<uint16_t>(quantize::chance_of(random, i));
  }
}

#endif

}  // namespace ark::ARK_REDUCE_ISA::quantizer
