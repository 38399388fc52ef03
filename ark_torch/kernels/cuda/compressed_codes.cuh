// What a thread does with eight neighbouring elements of a bucket: loads, codes, packed words, stores.
//
// A bucket is a team's: a warp's up to 512 elements, eight warps' up to 4096. A thread has groups of eight elements,
// its neighbours the next ones, and at most two of them: all of a bucket stays in registers between finding its scale
// and coding it. Eight codes of b bits are b bytes that begin at a byte (protocol/quantize.hpp), so threads share none.
#pragma once

#include "cuda/reduce.cuh"
#include "protocol/quantize.hpp"

namespace ark::device {

inline constexpr int kCodeThreads = 256;
inline constexpr uint32 kWarpBucket = 512;  // elements that a warp takes
inline constexpr int kMostPieces = 64;      // of one launch

struct CodePiece {
  quantize::Piece piece;
  uint64 first;  // buckets of this launch before it
};

struct CodeParams {
  const void* input;     // encode: elements; reduce: records of all ranks, one rank's part behind the other
  float* residual;       // null: none
  void* codes;           // encode, reduce: written; decode: read
  void* output;          // decode, sum: elements
  uint64 rank_bytes;     // reduce, sum: from one rank's records to the next's
  uint64 first_element;  // sum: of the part
  quantize::Rule rule;
  uint32 ranks, pieces;
  uint64 buckets;  // of this launch
  bool average;
  CodePiece piece[kMostPieces];
};
static_assert(sizeof(CodeParams) <= 4096);

#if defined(__CUDACC__)

inline constexpr int kGroup = 8, kHeld = 2;  // elements of a group, groups of a thread

template <class Format>
struct Elements {
  static constexpr uint32 kBytes = 4 / Format::kPerWord;

  static __device__ __forceinline__ float load_one(const char* from) {
    float pair[2];
    if constexpr (kBytes == 4)
      Format::decode(*reinterpret_cast<const uint32*>(from), pair);
    else
      Format::decode(*reinterpret_cast<const uint16*>(from), pair);
    return pair[0];
  }
  static __device__ __forceinline__ void store_one(char* to, float x) {
    const float pair[2] = {x, 0.0f};
    if constexpr (kBytes == 4)
      *reinterpret_cast<uint32*>(to) = Format::encode(pair);
    else
      *reinterpret_cast<uint16*>(to) = static_cast<uint16>(Format::encode(pair));
  }

  // `count` elements, with zeros behind; `wide`: eight of them at a multiple of 16 bytes.
  static __device__ __forceinline__ void load(const char* from, uint32 count, bool wide, float* x) {
    if (wide) {
      uint4 words[kBytes / 2];
      ARK_UNROLL for (int i = 0; i < static_cast<int>(kBytes) / 2; ++i) words[i] =
          reinterpret_cast<const uint4*>(from)[i];
      ARK_UNROLL for (int i = 0; i < static_cast<int>(kBytes) / 2; ++i) {
        float* const to = x + i * 4 * Format::kPerWord;
        Format::decode(words[i].x, to), Format::decode(words[i].y, to + Format::kPerWord);
        Format::decode(words[i].z, to + 2 * Format::kPerWord), Format::decode(words[i].w, to + 3 * Format::kPerWord);
      }
    } else {
      ARK_UNROLL for (int j = 0; j < kGroup; ++j) x[j] =
          static_cast<uint32>(j) < count ? load_one(from + j * kBytes) : 0.0f;
    }
  }
  static __device__ __forceinline__ void store(char* to, uint32 count, bool wide, const float* x) {
    if (wide) {
      ARK_UNROLL for (int i = 0; i < static_cast<int>(kBytes) / 2; ++i) {
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

// Eight codes of `bits` bits as one word, and back.
template <int kBits>
__device__ __forceinline__ uint64 packed(const uint32* code) {
  if constexpr (kBits <= 4) {
    uint32 word = 0;
    ARK_UNROLL for (int j = 0; j < kGroup; ++j) word |= code[j] << (j * kBits);
    return word;
  } else {
    uint64 word = 0;
    ARK_UNROLL for (int j = 0; j < kGroup; ++j) word |= static_cast<uint64>(code[j]) << (j * kBits);
    return word;
  }
}
template <int kBits>
__device__ __forceinline__ void unpacked(uint64 word, uint32* code) {
  ARK_UNROLL for (int j = 0; j < kGroup; ++j) code[j] = static_cast<uint32>(word >> (j * kBits)) & ((1u << kBits) - 1);
}

// Calls body.at<kBits>() for the width that a bucket has. Not a lambda: NVRTC takes a lambda with template parameters
// for a host function.
template <class Body>
__device__ __forceinline__ void of_width(uint32 bits, const Body& body) {
  switch (bits) {
    case 1: return body.template at<1>();
    case 2: return body.template at<2>();
    case 3: return body.template at<3>();
    case 4: return body.template at<4>();
    case 5: return body.template at<5>();
    case 6: return body.template at<6>();
    case 7: return body.template at<7>();
    default: return body.template at<8>();
  }
}

// A group's codes in a record: kBits bytes at a multiple of kBits.
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

// With subnormal numbers whatever the compiler was told, and a NaN where either is one.
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

#endif

}  // namespace ark::device
