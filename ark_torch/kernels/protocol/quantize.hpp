// Quantization by buckets: the layout of an encoded bucket, its arithmetic, and random numbers for rounding.
//
// This is the one definition for CPU and GPU: the vector kernels (csrc/collectives/compressed) and the CUDA kernels
// (cuda/compressed.cuh) produce the same bytes. Every operation is one float32 operation, rounded to nearest even, in
// the order written here: nothing may be contracted, reassociated or flushed to zero (cuda/formats.cuh).
#pragma once

#include "cuda/formats.cuh"

namespace ark::quantize {

// The record of a bucket of n elements is a head of 8 bytes, then codes of `bits` bits, little end first, with element
// i at bits [i * bits, (i + 1) * bits), padded with zeros to a multiple of 8 bytes. So every eighth element starts at a
// byte. Exact buckets (0 bits) have no head: their elements are stored unchanged.
//
// uniform: head {minimum, step}, value = minimum + code * step.  fp8: head {scale, 0}, value = e4m3(code) * scale. A
// bucket that contains a NaN or an infinity, or whose range exceeds float32, has NaN in the head and decodes to NaN. A
// step is never below the smallest normal number, so its reciprocal is finite; the error stays within step / 2.
//
// Random numbers: Philox4x32-10 (Salmon et al., 2011). Its key is the seed, its counter {element / 8, bucket, rank,
// stage}: each element has its own 16 bits, whatever thread, vector width or part of a buffer processes it.

enum class Format : uint32 { uniform = 0, fp8 = 1 };
enum class Rounding : uint32 { nearest = 0, stochastic = 1 };
// The quantization within a collective: of a rank's input, or of the sum at a part's owner.
enum class Stage : uint32 { first = 0, owner = 1 };

inline constexpr uint32 kMostBits = 8, kLeastBucket = 128, kMostBucket = 4096, kBucketStep = 32;
inline constexpr uint32 kHeadBytes = 8;
inline constexpr float kLargestFp8 = 448.0f;

// How a call's buckets are encoded; bits are per segment.
struct Rule {
  Format format;
  Rounding rounding;
  Stage stage;
  uint32 rank;
  uint64 seed;
};

// Consecutive buckets of one segment, all but the last with `bucket` elements.
struct Piece {
  uint64 element;  // position of the first element in the tensor
  uint64 at;       // offset of the first record, in bytes
  uint64 numel;
  uint32 number;  // the first bucket's number, counted over all segments
  uint32 bucket, bits;
};

ARK_DEVICE_INLINE constexpr uint64 code_bytes(uint64 numel, uint32 bits) {
  return ((numel + 7) / 8 * bits + 7) / 8 * 8;
}
ARK_DEVICE_INLINE constexpr uint64 record_bytes(uint64 numel, uint32 bits, uint32 element_bytes) {
  return bits == 0 ? (numel * element_bytes + 7) / 8 * 8 : kHeadBytes + code_bytes(numel, bits);
}
ARK_DEVICE_INLINE constexpr uint64 buckets_of(const Piece& piece) {
  return (piece.numel + piece.bucket - 1) / piece.bucket;
}

// The scale of a bucket: `inverse` makes codes, `base` and `step` are stored in the head.
struct Scale {
  float base, step, inverse;
};

ARK_DEVICE_INLINE Scale not_finite() {
  return {bits_as<float>(device::kNan32), 0.0f, 0.0f};
}
ARK_DEVICE_INLINE bool is_finite(float x) {
  return (bits_as<uint32>(x) & 0x7fffffff) < 0x7f800000;
}

ARK_DEVICE_INLINE float step_of(float range, float levels) {
  const float smallest = bits_as<float>(0x00800000u);
  const float step = device::divide(range, levels);
  return step < smallest ? smallest : step;
}

// For finite elements from `low` to `high`.
ARK_DEVICE_INLINE Scale uniform_scale(float low, float high, uint32 bits) {
  const float base = device::add(low, 0.0f);  // +0 for -0: the minimum of both may be either
  const float range = device::subtract(high, base);
  if (!is_finite(range)) return not_finite();
  const float step = step_of(range, static_cast<float>((1u << bits) - 1));
  return {base, step, device::divide(1.0f, step)};
}

// For finite elements of at most this magnitude. In the head, `base` is the scale.
ARK_DEVICE_INLINE Scale fp8_scale(float largest) {
  const float scale = step_of(largest, kLargestFp8);
  return {scale, 0.0f, device::divide(1.0f, scale)};
}

// 16 random bits as a number in [0, 1).
ARK_DEVICE_INLINE float fraction_of(uint32 chance) {
  return device::multiply(static_cast<float>(chance), 1.0f / 65536);
}

ARK_DEVICE_INLINE uint32 uniform_code(float x, const Scale& scale, uint32 bits, Rounding rounding, uint32 chance) {
  const float levels = static_cast<float>((1u << bits) - 1);
  float t = device::multiply(device::subtract(x, scale.base), scale.inverse);
  if (rounding == Rounding::stochastic) t = device::add(t, fraction_of(chance));
  t = t > 0.0f ? t : 0.0f;  // also for NaN
  t = t < levels ? t : levels;
  if (rounding == Rounding::stochastic) return static_cast<uint32>(t);
  return bits_as<uint32>(device::add(t, 8388608.0f)) & 0xff;  // the sum's last bit weighs 1
}

ARK_DEVICE_INLINE float uniform_value(uint32 code, float base, float step) {
  return device::add(base, device::multiply(static_cast<float>(code), step));
}

ARK_DEVICE_INLINE uint32 fp8_code(float x, const Scale& scale, Rounding rounding, uint32 chance) {
  const float y = device::canonical(device::multiply(x, scale.inverse));
  if (rounding == Rounding::nearest) return device::encode_small(device::layout_of(device::DType::f8_e4m3fn), y);
  const uint32 bits = bits_as<uint32>(y), magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7f;
  uint32 code;
  if (magnitude < 0x3c800000) {  // below 2^-6 codes are 2^-9 apart
    code = static_cast<uint32>(device::add(device::multiply(bits_as<float>(magnitude), 512.0f), fraction_of(chance)));
  } else {
    code = (magnitude - 0x3c000000 + (chance << 4)) >> 20;
    if (code > 0x7e) code = 0x7e;
  }
  return code | (bits >> 31) << 7;
}

ARK_DEVICE_INLINE float fp8_value(uint32 code, float scale) {
  return device::multiply(device::decode_small(device::layout_of(device::DType::f8_e4m3fn), code), scale);
}

struct Random {
  uint32 word[4];  // 16 bits per element, low half first
};

inline constexpr uint32 kPhiloxA = 0xD2511F53, kPhiloxB = 0xCD9E8D57, kWeylA = 0x9E3779B9, kWeylB = 0xBB67AE85;
inline constexpr int kPhiloxRounds = 10;

ARK_DEVICE_INLINE Random philox(uint64 seed, uint32 c0, uint32 c1, uint32 c2, uint32 c3) {
  uint32 k0 = static_cast<uint32>(seed), k1 = static_cast<uint32>(seed >> 32);
  ARK_UNROLL
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64 a = uint64{kPhiloxA} * c0, b = uint64{kPhiloxB} * c2;
    const uint32 n0 = static_cast<uint32>(b >> 32) ^ c1 ^ k0, n2 = static_cast<uint32>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32>(b), c3 = static_cast<uint32>(a), c0 = n0, c2 = n2;
    k0 += kWeylA, k1 += kWeylB;
  }
  return {{c0, c1, c2, c3}};
}

// For elements 8 * group to 8 * group + 7 of a bucket.
ARK_DEVICE_INLINE Random random_of(const Rule& rule, uint32 bucket, uint32 group) {
  return philox(rule.seed, group, bucket, rule.rank, static_cast<uint32>(rule.stage));
}
ARK_DEVICE_INLINE uint32 chance_of(const Random& random, uint32 element) {
  return random.word[element / 2] >> (element % 2 * 16) & 0xffff;
}

}  // namespace ark::quantize
