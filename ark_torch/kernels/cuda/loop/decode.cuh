// Decodes quantized weights to pairs of half-type elements for tensor cores: words of four 8-bit or eight 4-bit codes.
//
// A few instructions per word, as memory delivers a word every few clocks. Integers are inserted into the significand
// of a power of two, so that none is converted. The power is then subtracted from each pair, which is exact, or from
// their sums. A pair's depths are whichever are cheapest; rows are permuted to match (deal()). float8 decodes exactly
// to both half types, including NaN.
#pragma once

#include "cuda/loop/product.cuh"

namespace ark::loop {

using ark::Codes;

// a * b + c on pairs.
template <class T>
ARK_LOOP uint32 fused_pair(uint32 a, uint32 b, uint32 c) {
  uint32 sum;
  if constexpr (kSame<T, bf16>)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}
// (bits & kMask) ^ other in one instruction, which compilers do not find.
template <uint32 kMask>
ARK_LOOP uint32 masked_xor(uint32 bits, uint32 other) {
  uint32 joined;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(joined) : "r"(bits), "n"(kMask), "r"(other));
  return joined;
}
// The bits of an integer up to 256 (f16: 2048), in both halves of a word.
template <class T>
ARK_LOOP constexpr uint32 pair_of(int x) {
  if (x == 0) return 0;
  const uint32 sign = x < 0 ? 0x8000u : 0u;
  uint32 magnitude = x < 0 ? -x : x, exponent = 0;
  while (magnitude >> (exponent + 1) != 0) ++exponent;
  const uint32 rest = magnitude - (1u << exponent);
  const uint32 bits =
      kSame<T, bf16> ? (127 + exponent) << 7 | rest << 7 >> exponent : (15 + exponent) << 10 | rest << 10 >> exponent;
  return (sign | bits) * 0x10001u;
}
template <class T>
ARK_LOOP uint32 minus(uint32 pair, int x) {
  return fused_pair<T>(pair, pair_of<T>(1), pair_of<T>(-x));
}

// The power of two whose significand has room for a code of T, and its bits in both halves of a word.
template <class T>
inline constexpr int kPower = kSame<T, bf16> ? 128 : 1024;
template <class T>
inline constexpr uint32 kPowerBits = kSame<T, bf16> ? 0x43004300u : 0x64006400u;

// Two e4m3 codes in the high bytes of a word's halves; the low bytes are 0.
ARK_LOOP uint32 float8_pair(uint32 high_bytes, f16) {
  // f16's exponent bias is larger by 8: multiply by 2^8.
  const uint32 bits = (high_bytes & 0x80008000u) | (high_bytes & 0x7f007f00u) >> 1;
  const uint32 nan = __vcmpeq2(high_bytes & 0x7f007f00u, 0x7f007f00u);
  return fused_pair<f16>(bits, 0x5c005c00u, 0x80008000u) | (nan & 0x7e007e00u);
}
// Two adjacent e4m3 codes.
ARK_LOOP uint32 float8_pair(uint16 codes, f16 type) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(codes));
  return pair;
#else
  return float8_pair(__byte_perm(codes, 0, 0x1404), type);
#endif
}
ARK_LOOP uint32 float8_pair(uint16 codes, bf16 type) {
  const uint32 pair = float8_pair(codes, f16{});
  return pack_two(widen(f16{static_cast<uint16>(pair)}), widen(f16{static_cast<uint16>(pair >> 16)}), type);
}

// kRaises: 4-bit weights are left too large, since their sums can be corrected once, where each weight would take an
// instruction. Their codes become the upper bits of a significand, of kUnit * (16 + code).
template <Codes q, class B, class T, bool kRaises = false>
struct Coding {
  static constexpr int kPairs = q.bits == 4 ? 4 : 2;  // per word
  static constexpr int kOffset = q.offset + (q.is_signed ? 8 : 0);
  static constexpr bool kRaised = kRaises && q.bits == 4;
  static constexpr int kUnitBits = !kRaised ? 0 : kSame<T, bf16> ? 3 : 6;
  // What word() gives: kUnit * (weight + kSurplus).
  static constexpr int kUnit = 1 << kUnitBits, kSurplus = kRaised ? 16 + kOffset : 0;

  // Bits that every word is joined with. Kept in a register, since an instruction takes only one constant.
  static ARK_LOOP uint32 joined() {
    uint32 bits = q.bits == 8    ? kSame<T, bf16> ? 0x43434343u : 0x64646464u
                  : !q.is_signed ? kPowerBits<T>
                                 : kPowerBits<T> ^ 0x80008u << kUnitBits;
    asm volatile("" : "+r"(bits));
    return bits;
  }
  // Decodes a word, without scales. `power`: joined().
  static ARK_LOOP void word(uint32 codes, uint32 power, uint32 (&pairs)[kPairs]) {
    if constexpr (q.bits == 4) {
      ARK_UNROLL for (int i = 0; i < 4; ++i) {
        const uint32 placed = 4 * i < kUnitBits ? codes << (kUnitBits - 4 * i) : codes >> (4 * i - kUnitBits);
        pairs[i] = masked_xor<0x000f000fu << kUnitBits>(placed, power);
        if constexpr (!kRaised) pairs[i] = minus<T>(pairs[i], kPower<T> + kOffset);
      }
    } else if constexpr (kSame<B, e4m3>) {
      pairs[0] = float8_pair(static_cast<uint16>(codes), T{});
      pairs[1] = float8_pair(static_cast<uint16>(codes >> 16), T{});
    } else if constexpr (kSame<T, bf16>) {
      ARK_UNROLL for (int i = 0; i < 2; ++i) {
        // The significand has room for seven bits. The sign bit falls into the exponent, and 256 is subtracted instead
        // of 128.
        const uint32 two = __byte_perm(codes, power, i == 0 ? 0x4240 : 0x4341);
        pairs[i] = fused_pair<T>(two & 0xff80ff80u, pair_of<T>(-1), two & 0xff7fff7fu);
      }
    } else {
      const uint32 flipped = codes ^ 0x80808080u;
      ARK_UNROLL for (int i = 0; i < 2; ++i) pairs[i] =
          minus<T>(__byte_perm(flipped, power, i == 0 ? 0x4240 : 0x4341), kPower<T> + 128);
    }
    if constexpr (q.bits == 8 && q.offset != 0)
      ARK_UNROLL for (int i = 0; i < 2; ++i) pairs[i] = minus<T>(pairs[i], q.offset);
  }

  // Permutes eight consecutive elements of a row to the pairs that word() makes of a 4-bit word, or of two 8-bit words.
  static ARK_LOOP void deal(Chunk& row) {
    const Chunk by = row;
    const auto low = [](uint32 a, uint32 b) { return __byte_perm(a, b, 0x5410); };
    const auto high = [](uint32 a, uint32 b) { return __byte_perm(a, b, 0x7632); };
    if constexpr (q.bits == 4) {
      constexpr int f = q.high_first ? 1 : 0;
      ARK_UNROLL for (int i = 0; i < 2; ++i) {
        row.words[2 * i + f] = low(by.words[i], by.words[i + 2]);
        row.words[2 * i + 1 - f] = high(by.words[i], by.words[i + 2]);
      }
    } else if constexpr (!kSame<B, e4m3>) {
      ARK_UNROLL for (int i = 0; i < 4; i += 2) {
        row.words[i] = low(by.words[i], by.words[i + 1]);
        row.words[i + 1] = high(by.words[i], by.words[i + 1]);
      }
    }
  }

  // Decodes one number, at depth d of a column of bytes.
  static ARK_LOOP float one(const B* column, int d) {
    if constexpr (q.bits == 4) {
      const int code = column[d / 2] >> ((d & 1) == (q.high_first ? 1 : 0) ? 0 : 4) & 15;
      return static_cast<float>((q.is_signed ? code ^ 8 : code) - kOffset);
    } else if constexpr (kSame<B, e4m3>) {
      return widen(f16{static_cast<uint16>(float8_pair(static_cast<uint16>(column[d].bits), f16{}))}) - q.offset;
    } else {
      return static_cast<float>(column[d] - q.offset);
    }
  }
};

}  // namespace ark::loop
