// A thread's work on eight consecutive elements of a bucket: loads, codes, packed words, stores.
//
// A bucket belongs to a team: up to 512 elements to a warp, up to 4096 to eight warps. A thread has at most two groups
// of eight elements, adjacent threads adjacent groups, so a bucket stays in registers between finding its scale and
// encoding it. Eight codes of b bits are b whole bytes (protocol/quantize.hpp), so threads share none. Speed is limited
// by instructions per element, not by memory. So the width is a template argument, and conversions between integers and
// floats, which run at a quarter of the rate of additions, are done on mantissas, always exactly.
#pragma once

#include "cuda/fused/tiles.cuh"
#include "cuda/reduce.cuh"
#include "protocol/quantize.hpp"

namespace ark::device {

inline constexpr int kCodeThreads = 256;
inline constexpr uint32 kWarpBucket = 512;  // elements per warp
inline constexpr int kMostPieces = 64;      // per launch

inline constexpr int kEveryRank = -1;

struct CodePiece {
  quantize::Piece piece;
  uint32 first;  // buckets of this launch before it
  int rank;      // the rank whose place receives its records, or kEveryRank
};

struct CodeParams {
  TileLinks links;       // encode, reduce: where records go
  const void* input;     // encode: elements; else the records of all ranks, one rank's part after the other
  float* residual;       // null: none
  void* output;          // sum: elements
  long long* nonfinite;  // sum: smallest index of an element that is NaN or Inf, in host memory; null: not wanted
  uint64 records;        // encode, reduce: offset of this rank's records in a place
  uint64 rank_bytes;     // reduce, sum: stride between ranks' records
  uint64 first_element;  // sum: of the part
  quantize::Rule rule;
  uint32 ranks, pieces;
  uint32 buckets;  // of this launch
  uint32 run;      // consecutive buckets per team
  uint32 blocks;   // of all launches that fill these places
  bool average;
  CodePiece piece[kMostPieces];
};
static_assert(sizeof(CodeParams) <= 4096);

#if defined(__CUDACC__)

inline constexpr int kGroup = 8, kHeld = 2;  // elements per group, groups per thread

ARK_DEVICE_INLINE float fused(float a, float b, float c) {  // a * b + c, rounded once
  float result;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
}
ARK_DEVICE_INLINE float add_towards_zero(float a, float b) {
  float result;
  asm("add.rz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Handles subnormal numbers under any compiler options, and returns NaN if either operand is NaN.
__device__ __forceinline__ float least(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float most(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// The same for both halves of a word.
template <class Format>
struct Pairs {
  static constexpr bool kKnown = false;
};
#define ARK_PAIRS(Format, ptx)                                            \
  template <>                                                             \
  struct Pairs<Format> {                                                  \
    static constexpr bool kKnown = true;                                  \
    static __device__ __forceinline__ uint32 least(uint32 a, uint32 b) {  \
      uint32 result;                                                      \
      asm("min.NaN." ptx " %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b)); \
      return result;                                                      \
    }                                                                     \
    static __device__ __forceinline__ uint32 most(uint32 a, uint32 b) {   \
      uint32 result;                                                      \
      asm("max.NaN." ptx " %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b)); \
      return result;                                                      \
    }                                                                     \
  };
ARK_PAIRS(BFloat16, "bf16x2")
ARK_PAIRS(Float16, "f16x2")
#undef ARK_PAIRS

template <class Format>
struct Elements {
  static constexpr uint32 kBytes = 4 / Format::kPerWord;
  static constexpr int kWords = kGroup / Format::kPerWord;

  static __device__ __forceinline__ uint32 bits_of(const char* from) {
    return kBytes == 4 ? *reinterpret_cast<const uint32*>(from) : *reinterpret_cast<const uint16*>(from);
  }
  static __device__ __forceinline__ void store_one(char* to, float x) {
    const float pair[2] = {x, 0.0f};
    if constexpr (kBytes == 4)
      *reinterpret_cast<uint32*>(to) = Format::encode(pair);
    else
      *reinterpret_cast<uint16*>(to) = static_cast<uint16>(Format::encode(pair));
  }

  // Loads `count` elements, followed by those of `fill`; `wide`: eight of them at a multiple of 16 bytes.
  static __device__ __forceinline__ void load(const char* from, uint32 count, bool wide, const char* fill,
                                              uint32* words) {
    if (wide) {
      ARK_UNROLL for (int i = 0; i < kWords / 4; ++i) {
        const uint4 four = reinterpret_cast<const uint4*>(from)[i];
        words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
      }
      return;
    }
    ARK_UNROLL for (int w = 0; w < kWords; ++w) {
      words[w] = 0;
      ARK_UNROLL for (int i = 0; i < Format::kPerWord; ++i) {
        const uint32 j = w * Format::kPerWord + i;
        words[w] |= bits_of(j < count ? from + j * kBytes : fill) << (16 * i);
      }
    }
  }
  static __device__ __forceinline__ void decode(const uint32* words, float* x) {
    ARK_UNROLL for (int w = 0; w < kWords; ++w) Format::decode(words[w], x + w * Format::kPerWord);
  }
  static __device__ __forceinline__ void store(char* to, uint32 count, bool wide, const float* x) {
    if (wide) {
      ARK_UNROLL for (int i = 0; i < kWords / 4; ++i) {
        const float* const from = x + i * 4 * Format::kPerWord;
        reinterpret_cast<uint4*>(to)[i] =
            make_uint4(Format::encode(from), Format::encode(from + Format::kPerWord),
                       Format::encode(from + 2 * Format::kPerWord), Format::encode(from + 3 * Format::kPerWord));
      }
    } else {
      ARK_UNROLL for (int j = 0; j < kGroup; ++j) if (static_cast<uint32>(j) < count) store_one(to + j * kBytes, x[j]);
    }
  }
};

// Stores a group's codes in a record: kBits bytes at a multiple of kBits.
template <int kBits>
__device__ __forceinline__ void store_word(char* to, uint64 word) {
  if constexpr (kBits == 8) {
    *reinterpret_cast<uint64*>(to) = word;
  } else if constexpr (kBits == 4) {
    *reinterpret_cast<uint32*>(to) = static_cast<uint32>(word);
  } else if constexpr (kBits % 2 == 0) {
    ARK_UNROLL for (int i = 0; i < kBits / 2; ++i) reinterpret_cast<uint16*>(to)[i] =
        static_cast<uint16>(word >> (16 * i));
  } else {
    ARK_UNROLL for (int i = 0; i < kBits; ++i) to[i] = static_cast<char>(word >> (8 * i));
  }
}
template <int kBits>
__device__ __forceinline__ uint64 load_word(const char* from) {
  if constexpr (kBits == 8) {
    return *reinterpret_cast<const uint64*>(from);
  } else if constexpr (kBits == 4) {
    return *reinterpret_cast<const uint32*>(from);
  } else if constexpr (kBits % 2 == 0) {
    uint64 word = 0;
    ARK_UNROLL for (int i = 0; i < kBits / 2; ++i) word |= static_cast<uint64>(reinterpret_cast<const uint16*>(from)[i])
                                                           << (16 * i);
    return word;
  } else {
    uint64 word = 0;
    ARK_UNROLL for (int i = 0; i < kBits; ++i) word |= static_cast<uint64>(static_cast<unsigned char>(from[i]))
                                                       << (8 * i);
    return word;
  }
}

// Eight elements and their codes in one word: the codes of protocol/quantize.hpp, for finite buckets.
template <quantize::Format kFormat, int kBits>
struct Coder;

template <int kBits>
struct Coder<quantize::Format::uniform, kBits> {
  static constexpr uint32 kMask = (1u << kBits) - 1;
  static constexpr int kPer = kBits <= 4 ? 8 : 4;  // codes per 32-bit half
  static constexpr float kWhole = 8388608.0f;      // 2^23: from here on the last bit of a number weighs 1
  static constexpr bool kCodesNaN = false;         // codes of a bucket that is not finite are zeros

  static __device__ __forceinline__ quantize::Scale scale(float low, float high) {
    return quantize::uniform_scale(low, high, kBits);
  }

  // With kLost, x becomes the part that its codes do not represent. No number is below 0 or rounds above the last code,
  // since elements are between the bucket's minimum and maximum and the quotient errs by 2^-22. Only stochastic
  // rounding needs a bound.
  template <bool kChance, bool kLost>
  static __device__ __forceinline__ uint64 encode(float* x, const quantize::Scale& scale,
                                                  const quantize::Random& random) {
    constexpr float kLevels = static_cast<float>(kMask);
    uint32 half[2] = {0, 0}, extra[2] = {0, 0};
    ARK_UNROLL for (int j = 0; j < kGroup; ++j) {
      float t = multiply(subtract(x[j], scale.base), scale.inverse);
      if constexpr (kChance) {
        // 128 + chance / 2^16 has chance as the last 16 bits of its mantissa.
        t = add(t, subtract(bits_as<float>(0x43000000u | quantize::chance_of(random, j)), 128.0f));
        t = t < kLevels ? t : kLevels;
        t = add_towards_zero(t, kWhole);
      } else {
        t = add(t, kWhole);
      }
      half[j / kPer] += bits_as<uint32>(t) << (j % kPer * kBits);
      extra[j / kPer] += 0x4B000000u << (j % kPer * kBits);
      if constexpr (kLost) x[j] = subtract(x[j], add(scale.base, multiply(subtract(t, kWhole), scale.step)));
    }
    const uint64 high = kPer == 8 ? 0 : half[1] - extra[1];
    return (half[0] - extra[0]) | high << (4 * kBits);
  }

  struct Steps {
    float base, step;
    bool large;  // so large that its multiples by a power of two may not be finite
  };
  static __device__ __forceinline__ Steps steps(const float2& head) { return {head.x, head.y, head.y > 1e30f}; }

  // A code at bit p of a mantissa makes m = 1 + code * 2^(p - 23), and (m - 1) * step * 2^(23 - p), rounded once, is
  // code * step, rounded once.
  static __device__ __forceinline__ void decode(uint64 word, const Steps& steps, float* x) {
    constexpr int kLast = (kPer - 1) * kBits;
    constexpr int kShift = kLast + kBits <= 23 ? 0 : (kLast + kBits - 23 + kBits - 1) / kBits * kBits;
    const uint32 half[2] = {static_cast<uint32>(word), static_cast<uint32>(word >> (4 * kBits))};
    ARK_UNROLL for (int j = 0; j < kGroup; ++j) {
      const int p = j % kPer * kBits, at = p + kBits <= 23 ? p : p - kShift;
      const uint32 bits = (p + kBits <= 23 ? half[j / kPer] : half[j / kPer] >> kShift) & kMask << at;
      float product;
      if (steps.large) {
        product = multiply(static_cast<float>(bits >> at), steps.step);
      } else {
        const float unit = multiply(steps.step, bits_as<float>(static_cast<uint32>(127 + 23 - at) << 23));
        product = fused(bits_as<float>(0x3f800000u | bits), unit, -unit);
      }
      x[j] = add(steps.base, product);
    }
  }
};

template <>
struct Coder<quantize::Format::fp8, 8> {
  static constexpr bool kCodesNaN = true;

  static __device__ __forceinline__ quantize::Scale scale(float low, float high) {
    const float below = bits_as<float>(bits_as<uint32>(low) & 0x7fffffff);
    const float above = bits_as<float>(bits_as<uint32>(high) & 0x7fffffff);
    return quantize::fp8_scale(below > above ? below : above);
  }

  template <bool kChance, bool kLost>
  static __device__ __forceinline__ uint64 encode(float* x, const quantize::Scale& scale,
                                                  const quantize::Random& random) {
    uint32 half[2];
    ARK_UNROLL for (int i = 0; i < 2; ++i) {
      float* const four = x + 4 * i;
      if constexpr (!kChance && kHardware) {
        half[i] = pair_of(multiply(four[0], scale.inverse), multiply(four[1], scale.inverse)) |
                  pair_of(multiply(four[2], scale.inverse), multiply(four[3], scale.inverse)) << 16;
      } else {
        half[i] = 0;
        ARK_UNROLL for (int j = 0; j < 4; ++j) half[i] |=
            quantize::fp8_code(four[j], scale, kChance ? quantize::Rounding::stochastic : quantize::Rounding::nearest,
                               quantize::chance_of(random, 4 * i + j))
            << (8 * j);
      }
      if constexpr (kLost) {
        float value[4];
        values(half[i], value);
        ARK_UNROLL for (int j = 0; j < 4; ++j) four[j] = subtract(four[j], multiply(value[j], scale.base));
      }
    }
    return half[0] | static_cast<uint64>(half[1]) << 32;
  }

  struct Steps {
    float scale;
  };
  static __device__ __forceinline__ Steps steps(const float2& head) { return {head.x}; }
  static __device__ __forceinline__ void decode(uint64 word, const Steps& steps, float* x) {
    values(static_cast<uint32>(word), x), values(static_cast<uint32>(word >> 32), x + 4);
    ARK_UNROLL for (int j = 0; j < kGroup; ++j) x[j] = multiply(x[j], steps.scale);
  }

 private:
#if __CUDA_ARCH__ >= 890
  static constexpr bool kHardware = true;
#else
  static constexpr bool kHardware = false;
#endif
  static __device__ __forceinline__ uint32 pair_of(float first, float second) {
    uint16 pair = 0;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
#endif
    return pair;
  }
  static __device__ __forceinline__ void values(uint32 codes, float* x) {
#if __CUDA_ARCH__ >= 890
    ARK_UNROLL for (int i = 0; i < 2; ++i) {
      uint32 halves;
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16>(codes >> (16 * i))));
      Float16::decode(halves, x + 2 * i);
    }
#else
    ARK_UNROLL for (int j = 0; j < 4; ++j) x[j] = decode_small(layout_of(DType::f8_e4m3fn), codes >> (8 * j) & 0xff);
#endif
  }
};

#endif

}  // namespace ark::device
