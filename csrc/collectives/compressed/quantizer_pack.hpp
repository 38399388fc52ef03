// Packs byte codes into codes of 1 to 8 bits and unpacks them, eight per 64-bit word. Private to quantizer_<isa>.cpp.
//
// Three steps push a word's codes together (pairs, fours, all eight), and its low `bits` bytes are the result. Each
// word is stored whole, over the zero bytes of the previous one; a record's last words are stored at their exact size.
#pragma once

#include "collectives/cpu/reduce/reduce_lanes.hpp"
#include "protocol/quantize.hpp"

namespace ark::ARK_REDUCE_ISA::quantizer {

inline constexpr int kWords = ARK_REDUCE_BYTES / 8;
using Words = Vec<uint64_t, kWords>;

// Moves the upper half of each lane (16 * 2^n bits) down, or back up. Each half uses kUsed bits.
template <int kLane, int kUsed, class W>
ARK_INLINE W push(W x, bool down) {
  constexpr uint64_t lanes = ~uint64_t{0} / (kLane == 64 ? ~uint64_t{0} : (uint64_t{1} << (kLane % 64)) - 1);
  constexpr uint64_t low = ((uint64_t{1} << kUsed) - 1) * lanes;
  constexpr int way = kLane / 2 - kUsed;
  if (down) return (x & low) | (x >> way & low << kUsed);
  return (x & low) | (x << way & low << (kLane / 2));
}
template <int kBits, class W>
ARK_INLINE W squeeze(W x) {
  if constexpr (kBits < 8) {
    x = push<16, kBits>(x, true);
    x = push<32, 2 * kBits>(x, true);
    x = push<64, 4 * kBits>(x, true);
  }
  return x;
}
template <int kBits, class W>
ARK_INLINE W spread(W x) {
  if constexpr (kBits < 8) {
    x = push<64, 4 * kBits>(x, false);
    x = push<32, 2 * kBits>(x, false);
    x = push<16, kBits>(x, false);
  }
  return x;
}

// Zeros pad `codes` to a whole vector.
template <int kBits>
__attribute__((noinline)) void pack(const unsigned char* codes, uint32_t numel, unsigned char* to) {
  const uint32_t words = (numel + 7) / 8;
  const uint32_t bytes = static_cast<uint32_t>(quantize::code_bytes(numel, kBits));
  uint32_t w = 0;
  for (; (w + kWords - 1) * kBits + 8 <= bytes && w + kWords <= words; w += kWords) {
    const Words squeezed = squeeze<kBits>(load<Words, true>(codes + 8 * w, kWords));
#pragma GCC unroll 8
    for (int i = 0; i < kWords; ++i) {
      const uint64_t word = squeezed[i];
      __builtin_memcpy(to + (w + i) * kBits, &word, 8);
    }
  }
  for (; w < words; ++w) {
    uint64_t word;
    __builtin_memcpy(&word, codes + 8 * w, 8);
    word = squeeze<kBits>(word);
    __builtin_memcpy(to + w * kBits, &word, kBits);
  }
  for (uint32_t i = words * kBits; i < bytes; ++i) to[i] = 0;
}

// Writes whole vectors of codes.
template <int kBits>
__attribute__((noinline)) void unpack(const unsigned char* from, uint32_t numel, unsigned char* codes) {
  const uint32_t words = (numel + 7) / 8;
  const uint32_t bytes = static_cast<uint32_t>(quantize::code_bytes(numel, kBits));
  uint32_t w = 0;
  for (; (w + kWords - 1) * kBits + 8 <= bytes && w + kWords <= words; w += kWords) {
    Words packed;
#pragma GCC unroll 8
    for (int i = 0; i < kWords; ++i) {
      uint64_t word;
      __builtin_memcpy(&word, from + (w + i) * kBits, 8);
      packed[i] = word;
    }
    store<true>(codes + 8 * w, spread<kBits>(packed), kWords);
  }
  for (; w < words; ++w) {
    uint64_t word = 0;
    __builtin_memcpy(&word, from + w * kBits, kBits);
    word = spread<kBits>(word);
    __builtin_memcpy(codes + 8 * w, &word, 8);
  }
}

using PackFn = void (*)(const unsigned char*, uint32_t, unsigned char*);

ARK_INLINE PackFn packer(uint32_t bits) {
  static constexpr PackFn kOf[] = {nullptr, pack<1>, pack<2>, pack<3>, pack<4>, pack<5>, pack<6>, pack<7>, pack<8>};
  return kOf[bits];
}
ARK_INLINE PackFn unpacker(uint32_t bits) {
  static constexpr PackFn kOf[] = {nullptr,   unpack<1>, unpack<2>, unpack<3>, unpack<4>,
                                   unpack<5>, unpack<6>, unpack<7>, unpack<8>};
  return kOf[bits];
}

}  // namespace ark::ARK_REDUCE_ISA::quantizer
