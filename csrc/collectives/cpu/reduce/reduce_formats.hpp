// Element formats: convert stored lanes to accumulator lanes and back. Private to the reduce_<isa>.cpp files.
//
// A format has Raw (stored lanes), Acc (the same number of accumulator lanes), decode, and encode, which rounds once to
// nearest even. The bits match the conversions of PyTorch 2.13. Overflow gives infinity if the format has one, +-448 in
// e4m3fn (also for infinity; older versions gave NaN), and NaN in the fnuz formats, which have no negative zero.
// e8m0fnu drops the sign. encode requires canonical NaNs (see canonical()).
#pragma once

#include "reduce_lanes.hpp"
#include "reduce_widen.hpp"

namespace ark::ARK_REDUCE_ISA {

// Accumulates in its own type: float32, float64, integers (unsigned if wrapping must be defined).
template <class T>
struct Native {
  using Raw = Vec<T, ARK_REDUCE_BYTES / sizeof(T)>;
  using Acc = Raw;
  static ARK_INLINE Acc decode(Raw x) { return x; }
  static ARK_INLINE Raw encode(Acc x) { return x; }
};

// Any byte but 0 is true; results are 0 or 1.
struct Boolean {
  using Raw = Vec<uint8_t, ARK_REDUCE_BYTES>;
  using Acc = Raw;
  static ARK_INLINE Acc decode(Raw x) { return bits_as<Acc>(x != 0) & 1; }
  static ARK_INLINE Raw encode(Acc x) { return x; }
};

struct BFloat16 {
  using Raw = Vec<uint16_t, kLanes>;
  using Acc = F32;
  static ARK_INLINE Acc decode(Raw x) { return bits_as<F32>(widen(x) << 16); }
  static ARK_INLINE Raw encode(Acc x) {
    const I32 u = bits_as<I32>(x);
    return narrow<Raw>((u + 0x7fff + ((u >> 16) & 1)) >> 16);  // the canonical NaN gives 0x7fc0
  }
};

enum class Specials { ieee, fn, fnuz };  // infinity and NaNs; one NaN magnitude; one NaN in place of -0

// Sign, kExponent bits, kMantissa bits: float16 and the four signed float8 formats, in integer arithmetic.
template <class Bits, int kExponent, int kMantissa, int kBias, Specials kSpecials>
struct SmallFloat {
  using Raw = Vec<Bits, kLanes>;
  using Acc = F32;
  static constexpr int kShift = 23 - kMantissa;  // mantissa bits that rounding drops
  static constexpr int kRebias = 127 - kBias;    // difference of the exponents' biases
  static constexpr int kSign = 1 << (kExponent + kMantissa);
  static constexpr int kTopExponent = (kSign - 1) & -(1 << kMantissa);  // ieee: infinity
  static constexpr int kNan = kSpecials == Specials::fnuz ? kSign
                              : kSpecials == Specials::fn ? kSign - 1
                              : sizeof(Bits) == 1         ? kSign - 1  // as PyTorch does for e5m2: all ones
                                                          : kTopExponent | (1 << (kMantissa - 1));
  static constexpr int kOverflow = kSpecials == Specials::ieee ? kTopExponent
                                   : kSpecials == Specials::fn ? kSign - 2  // the largest value
                                                               : kNan;

  static constexpr float power(int exponent) { return __builtin_bit_cast(float, (exponent + 127) << 23); }

  static ARK_INLINE Acc decode(Raw x) {
    const I32 wide = widen(x);
    const I32 magnitude = wide & (kSign - 1);
    const I32 normal = (magnitude << kShift) + (kRebias << 23);
    const F32 subnormal = __builtin_convertvector(magnitude, F32) * power(1 - kBias - kMantissa);
    I32 bits = magnitude < (1 << kMantissa) ? bits_as<I32>(subnormal) : normal;
    if constexpr (kSpecials == Specials::ieee) {
      bits = magnitude >= kTopExponent ? (magnitude << kShift) | 0x7f800000 : bits;
    } else if constexpr (kSpecials == Specials::fn) {
      bits = magnitude == kNan ? I32{} + 0x7fc00000 : bits;
    } else {
      bits = wide == kNan ? I32{} + 0x7fc00000 : bits;
    }
    return bits_as<F32>(bits | ((wide & kSign) << (31 - kExponent - kMantissa)));
  }

  static ARK_INLINE Raw encode(Acc x) {
    constexpr int kSmallestNormal = (kRebias + 1) << 23;
    constexpr float kMagic = power(23 + 1 - kBias - kMantissa);  // its last bit has the weight of the format's
    const I32 u = bits_as<I32>(x);
    const I32 magnitude = u & 0x7fffffff;
    const I32 odd = (magnitude >> kShift) & 1;
    const I32 normal = (magnitude - (kRebias << 23) + ((1 << (kShift - 1)) - 1) + odd) >> kShift;
    const I32 subnormal = bits_as<I32>(bits_as<F32>(magnitude) + kMagic) - __builtin_bit_cast(int32_t, kMagic);
    I32 r = magnitude < kSmallestNormal ? subnormal : (normal < kOverflow ? normal : I32{} + kOverflow);
    if constexpr (kNan != kOverflow) r = magnitude > 0x7f800000 ? I32{} + kNan : r;
    I32 sign = (u >> (31 - kExponent - kMantissa)) & kSign;
    if constexpr (kSpecials == Specials::fnuz) sign = r == 0 ? I32{} : sign;
    return narrow<Raw>(r | sign);
  }
};

// Uses the CPU's conversion if it has one.
#if ARK_REDUCE_BYTES == 64
struct Float16 {
  using Raw = Vec<uint16_t, kLanes>;
  using Acc = F32;
  static ARK_INLINE Acc decode(Raw x) { return bits_as<F32>(_mm512_maskz_cvtph_ps(0xffff, bits_as<__m256i>(x))); }
  static ARK_INLINE Raw encode(Acc x) {
    constexpr int kRounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return bits_as<Raw>(_mm512_maskz_cvtps_ph(0xffff, bits_as<__m512>(x), kRounding));
  }
};
#elif ARK_REDUCE_BYTES == 32
struct Float16 {
  using Raw = Vec<uint16_t, kLanes>;
  using Acc = F32;
  static ARK_INLINE Acc decode(Raw x) { return bits_as<F32>(_mm256_cvtph_ps(bits_as<__m128i>(x))); }
  static ARK_INLINE Raw encode(Acc x) {
    return bits_as<Raw>(_mm256_cvtps_ph(bits_as<__m256>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};
#else
using Float16 = SmallFloat<uint16_t, 5, 10, 15, Specials::ieee>;
#endif

using Float8E4M3FN = SmallFloat<uint8_t, 4, 3, 7, Specials::fn>;
using Float8E5M2 = SmallFloat<uint8_t, 5, 2, 15, Specials::ieee>;
using Float8E4M3FNUZ = SmallFloat<uint8_t, 4, 3, 8, Specials::fnuz>;
using Float8E5M2FNUZ = SmallFloat<uint8_t, 5, 2, 16, Specials::fnuz>;

// Powers of two from 2^-127 to 2^127, and NaN (255). Ties round up, towards PyTorch's implied odd bit, except below the
// smallest normal float32.
struct Float8E8M0FNU {
  using Raw = Vec<uint8_t, kLanes>;
  using Acc = F32;
  static ARK_INLINE Acc decode(Raw x) {
    const I32 wide = widen(x);
    const I32 bits = wide == 0 ? I32{} + 0x00400000 : wide << 23;
    return bits_as<F32>(wide == 255 ? I32{} + 0x7fc00000 : bits);
  }
  static ARK_INLINE Raw encode(Acc x) {
    const I32 any = bits_as<I32>(x) & 0x7fffffff;
    const I32 magnitude = any < 0x7f800000 ? any : I32{} + 0x7f800000;           // NaN becomes 255, like infinity
    return narrow<Raw>((magnitude + 0x3fffff - (magnitude >= 0x800000)) >> 23);  // a true comparison is -1
  }
};

}  // namespace ark::ARK_REDUCE_ISA
