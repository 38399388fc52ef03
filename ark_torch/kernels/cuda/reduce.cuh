// Elementwise reduction in device code, bit for bit that of csrc/collectives/cpu/reduce/reduce.hpp. Accesses no memory.
//
// A rule reduces one unit (16 bytes) of every rank: first(rank 0's), add(each further rank's, in rank order), finish.
// 8- and 16-bit floats accumulate in float32 and are rounded once, in finish. SumRule<Format> covers what models are
// trained with (SUM and AVG of bfloat16, float16 and float32), in registers only and without branches on the type.
// GenericRule covers all other pairs, chosen at run time. Both have the same interface, so that kernels are templates
// over their rule. Where floats accumulate wider than they are (float32 of 8- and 16-bit ones), lanes() are the scalars
// of an accumulator, scalars() of them, and merge() adds another accumulator: so partial sums can travel unrounded. A
// tail is a unit with any padding: elements (or a complex number's two parts) never mix, and nothing traps. The host
// refuses pairs that why_unsupported() names; their results here are unspecified.
#pragma once

#include "cuda/formats.cuh"

namespace ark::device {

struct alignas(16) Unit {
  uint64 lo, hi;
};

struct BFloat16 {
  static constexpr int kPerWord = 2;
  static ARK_DEVICE_INLINE void decode(uint32 word, float* lanes) { decode_bf16_pair(word, lanes[0], lanes[1]); }
  static ARK_DEVICE_INLINE uint32 encode(const float* lanes) { return encode_bf16_pair(lanes[0], lanes[1]); }
#if ARK_DEVICE_CODE
  static ARK_DEVICE_INLINE void round(float* lanes) {
    round_bf16_pair(lanes[0], lanes[1]);
  }
#endif
};
struct Float16 {
  static constexpr int kPerWord = 2;
  static ARK_DEVICE_INLINE void decode(uint32 word, float* lanes) { decode_f16_pair(word, lanes[0], lanes[1]); }
  static ARK_DEVICE_INLINE uint32 encode(const float* lanes) { return encode_f16_pair(lanes[0], lanes[1]); }
#if ARK_DEVICE_CODE
  static ARK_DEVICE_INLINE void round(float* lanes) {
    round_f16_pair(lanes[0], lanes[1]);
  }
#endif
};
struct Float32 {
  static constexpr int kPerWord = 1;
  static ARK_DEVICE_INLINE void decode(uint32 word, float* lanes) { lanes[0] = bits_as<float>(word); }
  static ARK_DEVICE_INLINE uint32 encode(const float* lanes) { return bits_as<uint32>(canonical(lanes[0])); }
};

// Whether SumRule covers the pair. Complex numbers add like their scalars: ask for scalar_of(dtype).
ARK_DEVICE_INLINE constexpr bool hot(DType dtype, ReduceOp op) {
  return (op == ReduceOp::sum || op == ReduceOp::avg) &&
         (dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f32);
}

template <class Format>
struct SumRule {
  static constexpr int kLanes = 4 * Format::kPerWord;
  struct Accumulator {
    float lanes[kLanes];
  };

  static ARK_DEVICE_INLINE constexpr int scalars() { return kLanes; }
  static ARK_DEVICE_INLINE float* lanes(Accumulator& acc) { return acc.lanes; }

  static ARK_DEVICE_INLINE Accumulator first(const Unit& unit, double /*factor*/ = 1) {
    const uint32 words[] = {static_cast<uint32>(unit.lo), static_cast<uint32>(unit.lo >> 32),
                            static_cast<uint32>(unit.hi), static_cast<uint32>(unit.hi >> 32)};
    Accumulator acc;
    ARK_UNROLL
    for (int w = 0; w < 4; w++) Format::decode(words[w], acc.lanes + w * Format::kPerWord);
    return acc;
  }

  static ARK_DEVICE_INLINE void add(Accumulator& acc, const Unit& unit, double /*factor*/ = 1) {
    merge(acc, first(unit));
  }

  static ARK_DEVICE_INLINE void merge(Accumulator& acc, const Accumulator& next) {
    ARK_UNROLL
    for (int i = 0; i < kLanes; i++) acc.lanes[i] = device::add(acc.lanes[i], next.lanes[i]);
  }

  static ARK_DEVICE_INLINE Unit finish(const Accumulator& sum, int ranks, bool average) {
    Accumulator acc = sum;
    if (average) {
      ARK_UNROLL
      for (int i = 0; i < kLanes; i++) acc.lanes[i] = divide_by_ranks(acc.lanes[i], ranks);
    }
    uint32 words[4];
    ARK_UNROLL
    for (int w = 0; w < 4; w++) words[w] = Format::encode(acc.lanes + w * Format::kPerWord);
    return {words[0] | static_cast<uint64>(words[1]) << 32, words[2] | static_cast<uint64>(words[3]) << 32};
  }
};

// Every (dtype, operation) pair. If both are constants (in a kernel generated for them), switches fold, loops unroll
// and all stays in registers; otherwise lanes are in local memory.
struct GenericRule {
  DType dtype;
  ReduceOp op;

  union Accumulator {
    float f32[16];  // for every float format up to 32 bits
    double f64[2];
    Unit integers;  // including bool, as bytes 0 and 1
  };

  ARK_DEVICE_INLINE int scalars() const { return 16 / scalar_bytes(dtype); }
  static ARK_DEVICE_INLINE float* lanes(Accumulator& acc) { return acc.f32; }

  ARK_DEVICE_INLINE Accumulator first(const Unit& unit, double factor = 1) const {
    Accumulator acc;
    if (is_integer(dtype)) {
      acc.integers = integers(unit);
    } else if (scalar_of(dtype) == DType::f64) {
      acc.f64[0] = premultiplied(bits_as<double>(unit.lo), factor);
      acc.f64[1] = premultiplied(bits_as<double>(unit.hi), factor);
    } else {
      for (int i = 0; i < scalars(); i++) acc.f32[i] = premultiplied(lane(unit, i), factor);
    }
    return acc;
  }

  ARK_DEVICE_INLINE void add(Accumulator& acc, const Unit& unit, double factor = 1) const {
    if (is_integer(dtype)) {
      const Unit next = integers(unit);
      acc.integers = {combine_word(acc.integers.lo, next.lo), combine_word(acc.integers.hi, next.hi)};
      return;
    }
    const Accumulator next = first(unit, factor);
    if (scalar_of(dtype) == DType::f64) {
      combine_pair(acc.f64, next.f64);
    } else {
      merge(acc, next);
    }
  }

  ARK_DEVICE_INLINE void merge(Accumulator& acc, const Accumulator& next) const {
    for (int i = 0; i < scalars(); i += 2) combine_pair(acc.f32 + i, next.f32 + i);
  }

  // `average` is ignored; the rule's own operation decides.
  ARK_DEVICE_INLINE Unit finish(const Accumulator& acc, int ranks, bool /*average*/ = false) const {
    if (is_integer(dtype)) return acc.integers;
    if (scalar_of(dtype) == DType::f64) {
      return {bits_as<uint64>(canonical(averaged(acc.f64[0], ranks))),
              bits_as<uint64>(canonical(averaged(acc.f64[1], ranks)))};
    }
    const int bits = 8 * scalar_bytes(dtype), half = scalars() / 2;
    Unit unit{0, 0};
    for (int i = scalars() - 1; i >= 0; i--) {
      uint64& word = i < half ? unit.lo : unit.hi;
      word = word << bits | encode(canonical(averaged(acc.f32[i], ranks)));
    }
    return unit;
  }

 private:
  ARK_DEVICE_INLINE float lane(const Unit& unit, int i) const {
    const int bits = 8 * scalar_bytes(dtype), half = scalars() / 2;
    const uint64 word = i < half ? unit.lo : unit.hi;
    const uint32 code = static_cast<uint32>(word >> ((i & (half - 1)) * bits)) & (0xffffffffu >> (32 - bits));
    switch (scalar_of(dtype)) {
      case DType::f32: return bits_as<float>(code);
      case DType::bf16: return bits_as<float>(code << 16);
      case DType::f8_e8m0fnu: return decode_scale(code);
      default: return decode_small(layout_of(scalar_of(dtype)), code);
    }
  }

  ARK_DEVICE_INLINE uint32 encode(float x) const {
    switch (scalar_of(dtype)) {
      case DType::f32: return bits_as<uint32>(x);
      case DType::bf16: return encode_bf16(x);
      case DType::f8_e8m0fnu: return encode_scale(x);
      default: return encode_small(layout_of(scalar_of(dtype)), x);
    }
  }

  template <class T>
  ARK_DEVICE_INLINE T premultiplied(T x, double factor) const {
    if (op != ReduceOp::premul_sum) return x;
    T rounded;
    round_to(rounded, factor);
    return multiply(x, rounded);
  }

  template <class T>
  ARK_DEVICE_INLINE T averaged(T x, int ranks) const {
    return op == ReduceOp::avg ? divide_by_ranks(x, ranks) : x;
  }

  // Two consecutive scalars, which only a complex product combines: (ar br - ai bi, ar bi + ai br), products rounded.
  template <class T>
  ARK_DEVICE_INLINE void combine_pair(T* a, const T* b) const {
    if (op == ReduceOp::product && is_complex(dtype)) {
      const T real = subtract(multiply(a[0], b[0]), multiply(a[1], b[1]));
      a[1] = device::add(multiply(a[0], b[1]), multiply(a[1], b[0]));
      a[0] = real;
    } else {
      a[0] = combine(a[0], b[0]);
      a[1] = combine(a[1], b[1]);
    }
  }

  template <class T>
  ARK_DEVICE_INLINE T combine(T a, T b) const {
    switch (op) {
      case ReduceOp::product: return multiply(a, b);
      case ReduceOp::min:
      case ReduceOp::max:
        if (is_nan(a) || is_nan(b)) return is_nan(a) ? a : b;
        return (op == ReduceOp::max) == (order_of(a) > order_of(b)) ? a : b;
      default: return device::add(a, b);
    }
  }

  // A bool is true for any byte but 0: moves down the top bit of each byte.
  ARK_DEVICE_INLINE Unit integers(const Unit& unit) const {
    if (dtype != DType::boolean) return unit;
    constexpr uint64 kOnes = 0x0101010101010101, kLow = 0x7f * kOnes;
    return {((((unit.lo & kLow) + kLow) | unit.lo) >> 7) & kOnes, ((((unit.hi & kLow) + kLow) | unit.hi) >> 7) & kOnes};
  }

  ARK_DEVICE_INLINE uint64 combine_word(uint64 a, uint64 b) const {
    const bool boolean = dtype == DType::boolean;
    if (op == ReduceOp::bxor) return a ^ b;
    if (op == ReduceOp::bor || (boolean && (op == ReduceOp::sum || op == ReduceOp::max))) return a | b;
    if (op == ReduceOp::band || boolean) return a & b;
    const int bits = 8 * scalar_bytes(dtype), unused = 64 - bits;
    const uint64 sign = is_signed(dtype) ? 1ull << 63 : 0;
    uint64 result = 0;
    for (int at = 0; at < 64; at += bits) {
      const uint64 x = a >> at << unused, y = b >> at << unused;  // at the top, so that it wraps and compares
      uint64 z;
      switch (op) {
        case ReduceOp::product: z = (x >> unused) * y; break;
        case ReduceOp::min: z = (x ^ sign) < (y ^ sign) ? x : y; break;
        case ReduceOp::max: z = (x ^ sign) > (y ^ sign) ? x : y; break;
        default: z = x + y;
      }
      result |= z >> unused << at;
    }
    return result;
  }
};

}  // namespace ark::device
