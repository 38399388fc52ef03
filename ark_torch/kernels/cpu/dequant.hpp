// Matrix products with quantized weights: out[r, c] = sum over d of a[r, d] w[d, c] (+ bias[r, c]). Weights are decoded
// in registers, so that only codes stream from memory: int8, float8 (e4m3), or two 4-bit codes per byte.
//
// Lanes are along the contiguous depth, as in dot_tile of matmul.hpp, and here too an element's sum has one order. Rows
// are first packed as float32. For 4 bits they are permuted, for each pair of vectors the elements of bytes' low halves
// first, so that a vector of bytes becomes two vectors of weights without a shuffle. Scales of groups multiply the
// weights, scales of whole columns of 8 bits the finished sum.
#pragma once

#include "cpu/matmul.hpp"
#include "protocol/codes.hpp"

namespace ark::cpu {

using ark::Codes;
using ark::NoScale;

using SignedBytes = int8_t __attribute__((vector_size(kLanes)));
using SignedHalves = int16_t __attribute__((vector_size(kLanes * 2)));

template <class Lanes>
ARK_INLINE Bytes load_bytes(const void* from, Lanes lanes) {
  Bytes raw{};
  std::memcpy(&raw, from, static_cast<size_t>(count_of(lanes)));
  return raw;
}

// GCC compiles these conversions of byte vectors to scalar code, so intrinsics do them.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
ARK_INLINE Words words_of(Bytes raw) {
  return same_bits<Words>(_mm512_cvtepu8_epi32(same_bits<__m128i>(raw)));
}
ARK_INLINE Shorts words_of(SignedBytes raw) {
  return same_bits<Shorts>(_mm512_cvtepi8_epi32(same_bits<__m128i>(raw)));
}
ARK_INLINE SignedHalves halves_of(SignedBytes raw) {
  return same_bits<SignedHalves>(_mm256_cvtepi8_epi16(same_bits<__m128i>(raw)));
}
#else
ARK_INLINE Words words_of(Bytes raw) {
  return __builtin_convertvector(__builtin_convertvector(raw, Halves), Words);
}
ARK_INLINE SignedHalves halves_of(SignedBytes raw) {
  return __builtin_convertvector(raw, SignedHalves);
}
ARK_INLINE Shorts words_of(SignedBytes raw) {
  return __builtin_convertvector(halves_of(raw), Shorts);
}
#endif

// 8-bit codes as numbers. e4m3 codes become value / 256, through float16, whose exponent bias is larger by 8.
ARK_INLINE Floats numbers_of(Bytes raw, int8_t) {
  return __builtin_convertvector(words_of(same_bits<SignedBytes>(raw)), Floats);
}
ARK_INLINE Floats numbers_of(Bytes raw, e4m3) {
  const Halves half = same_bits<Halves>(halves_of(same_bits<SignedBytes>(raw)) << 7) & static_cast<uint16_t>(0xbf80);
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m128i all = _mm_set1_epi8(-1);
  const __mmask16 nan = _mm_cmpeq_epi8_mask(_mm_or_si128(same_bits<__m128i>(raw), _mm_set1_epi8(-128)), all);
  return same_bits<Floats>(
      _mm512_cvtph_ps(_mm256_mask_mov_epi16(same_bits<__m256i>(half), nan, _mm256_set1_epi16(0x7e00))));
#else
  const Halves nan = same_bits<Halves>((half & static_cast<uint16_t>(0x3f80)) == static_cast<uint16_t>(0x3f80));
  return widen(half | (nan & static_cast<uint16_t>(0x7e00)), f16{});
#endif
}
template <class B>
inline constexpr float kUnit = std::is_same_v<B, e4m3> ? 256.0f : 1.0f;

// The coefficients of (code - before) * scale + after for a group of a column.
template <Codes q, class B, class Scale, class Zero>
struct Column {
  static constexpr int kFlip = q.is_signed ? 8 : 0;  // makes a signed 4-bit code unsigned
  static constexpr bool kScaled = !std::is_same_v<Scale, NoScale>, kZeros = !std::is_same_v<Zero, NoScale>;
  static constexpr int kOffset = q.offset + kFlip;
  static constexpr bool kBefore = kOffset != 0 || (kZeros && !q.zero_after), kAfter = kZeros && q.zero_after;
  // The unit of codes, applied first if it cannot be part of the scale.
  static constexpr float kFirst = kBefore ? kUnit<B> : 1;
  float before = kOffset, scale = kUnit<B> / kFirst, after = 0;

  Column() = default;
  ARK_INLINE Column(const Scale* scales, const Zero* zeros, int64_t g, int64_t c) {
    if constexpr (kScaled) scale *= load_one(scales + g * q.scale.group + c * q.scale.column);
    if constexpr (kZeros) {
      const auto zero = static_cast<float>(load_one(zeros + g * q.zero.group + c * q.zero.column));
      (q.zero_after ? after : before) += zero;
    }
  }
  ARK_INLINE Floats decoded(Floats codes) const {
    if constexpr (kFirst != 1) codes *= splat(kFirst);
    if constexpr (kBefore) codes -= splat(before);
    if constexpr (kScaled || kUnit<B> != kFirst) codes *= splat(scale);
    if constexpr (kAfter) codes += splat(after);
    return codes;
  }
};

// Two 4-bit weights per byte: of its low and of its high half. AVX-512 looks up a group's sixteen values.
template <class Of>
struct Nibbles {
#if defined(__AVX512F__)
  __m512 table;
  Nibbles() = default;
  ARK_INLINE explicit Nibbles(const Of& column)
      : table(same_bits<__m512>(column.decoded(__builtin_convertvector(kIota32 ^ Of::kFlip, Floats)))) {}
  ARK_INLINE Floats of(Words codes) const {
    return same_bits<Floats>(_mm512_permutexvar_ps(same_bits<__m512i>(codes), table));
  }
#else
  Of column;
  Nibbles() = default;
  ARK_INLINE explicit Nibbles(const Of& column) : column(column) {}
  ARK_INLINE Floats of(Words codes) const {
    const Words flipped = (codes & 15u) ^ static_cast<uint32_t>(Of::kFlip);
    return column.decoded(__builtin_convertvector(same_bits<Shorts>(flipped), Floats));
  }
#endif
  ARK_INLINE Floats low(Bytes raw) const {
    return of(words_of(raw));
  }
  ARK_INLINE Floats high(Bytes raw) const {
    return of(words_of(raw) >> 4);
  }
};

// Whether a column's scale can be applied to its finished sum.
template <Product s, Codes q, class Zero>
inline constexpr bool kScaledLast = q.bits == 8 && q.group == s.depth&& q.offset == 0 && std::is_same_v<Zero, NoScale>;

// Rows times columns from r0 and c0 on. `a`: packed rows at stride a_row.
template <int Rows, int Columns, Product s, Codes q, class B, class Scale, class Zero, class Out, class Bias>
ARK_INLINE void dequant_tile(const float* a, int64_t a_row, const B* b, const Scale* scales, const Zero* zeros,
                             Out* out, const Bias* bias, int64_t r0, int64_t c0) {
  using Of = Column<q, B, Scale, Zero>;
  constexpr bool kLast = kScaledLast<s, q, Zero>;
  constexpr int64_t kStep = q.bits == 4 ? 2 * kLanes : kLanes;
  const B* const codes = b + c0 * s.b_column;
  Wide total[Rows][Columns] = {};
  for (int64_t group = 0; group * q.group < s.depth; ++group) {
    const auto of = [&](int c) ARK_BODY {
      if constexpr (q.bits == 4)
        return Nibbles<Of>(Of(scales, zeros, group, c0 + c));
      else
        return Of(scales, zeros, group, c0 + c);
    };
    const auto add = [&](int64_t d, const auto& column, auto lanes) ARK_BODY {
      Wide x[q.bits == 4 ? 2 : 1][Rows];
      ARK_UNROLL for (int r = 0; r < Rows; ++r) {
        x[0][r] = load_wide(a + r * a_row + d, All{});
        if constexpr (q.bits == 4) x[1][r] = load_wide(a + r * a_row + d + kLanes, All{});
      }
      ARK_UNROLL for (int c = 0; c < Columns; ++c) {
        const B* const from = codes + c * s.b_column + d * q.bits / 8;
        const Bytes raw = load_bytes(from, lanes);
        // As in dot_tile of matmul.hpp, once per cache line.
        if (Rows <= 4 && d * q.bits / 8 % 64 == 0) __builtin_prefetch(from + Columns * s.b_column, 0, 2);
        if constexpr (q.bits == 4) {
          const Wide low = wide(column[c].low(raw)), high = wide(column[c].high(raw));
          ARK_UNROLL for (int r = 0; r < Rows; ++r) {
            add_product(total[r][c], x[0][r], low);
            add_product(total[r][c], x[1][r], high);
          }
        } else {
          const Wide w = wide(kLast ? numbers_of(raw, B{}) : column[c].decoded(numbers_of(raw, B{})));
          ARK_UNROLL for (int r = 0; r < Rows; ++r) add_product(total[r][c], x[0][r], w);
        }
      }
    };
    const auto walk = [&](const auto& column) ARK_BODY {
      const int64_t end = (group + 1) * q.group;
      int64_t d = group * q.group;
      for (; d + kStep <= end; d += kStep) add(d, column, All{});
      if constexpr (q.group % kStep != 0) add(d, column, First{static_cast<int>((end - d) * q.bits / 8)});
    };
    std::conditional_t<q.bits == 4, Nibbles<Of>, Of> columns[Columns];
    ARK_UNROLL for (int c = 0; c < Columns; ++c) columns[c] = of(c);
    walk(columns);
  }
  ARK_UNROLL for (int r = 0; r < Rows; ++r) ARK_UNROLL for (int c = 0; c < Columns; ++c) {
    float sum = sum_of(narrow(total[r][c]));
    if constexpr (kLast) sum *= Of(scales, zeros, 0, c0 + c).scale;
    finish_one(s, out, bias, r0 + r, c0 + c, sum);
  }
}

template <int Rows, Product s, Codes q, class B, class Scale, class Zero, class Out, class Bias>
inline void dequant_rows(const float* a, int64_t a_row, const B* b, const Scale* scales, const Zero* zeros, Out* out,
                         const Bias* bias, int64_t r0, int64_t c0, int64_t c1) {
  constexpr int kColumns = Rows == 1 ? kStreams : kTileColumns;
  int64_t c = c0;
  for (; c + kColumns <= c1; c += kColumns)
    dequant_tile<Rows, kColumns, s, q>(a, a_row, b, scales, zeros, out, bias, r0, c);
  for (; c < c1; ++c) dequant_tile<Rows, 1, s, q>(a, a_row, b, scales, zeros, out, bias, r0, c);
}

// Floats per packed row.
constexpr int64_t packed_length(int64_t depth) {
  return (depth + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
}

// The index of depth d in a packed row.
template <Codes q>
ARK_INLINE int64_t place_of(int64_t d) {
  if constexpr (q.bits == 8 || q.block != 0) return d;
  const int64_t pair = d / (2 * kLanes) * (2 * kLanes), half = (d & 1) ^ (q.high_first ? 1 : 0);
  return pair + half * kLanes + (d - pair) / 2;
}

}  // namespace ark::cpu

#include "cpu/dequant_blocked.hpp"

namespace ark::cpu {

// Rows [r0, r1) and columns [c0, c1). MostRows bounds r1 - r0. `scratch` holds min(MostRows, kRowBlock) packed rows.
template <int64_t MostRows, Product s, Codes q, class A, class B, class Scale, class Zero, class Out, class Bias>
ARK_INLINE void dequant_product(const A* a, const B* b, const Scale* scales, const Zero* zeros, Out* out,
                                const Bias* bias, int64_t r0, int64_t r1, int64_t c0, int64_t c1, char* scratch) {
  constexpr int64_t kLength = packed_length(s.depth);
  auto* const packed = reinterpret_cast<float*>(scratch);
  // With few rows all columns pass at once, else as many as fit in the first-level cache with a block of rows.
  constexpr int64_t kPass = MostRows == 1 ? int64_t{1} << 62 : q.block != 0 ? q.block : kTileColumns;
  for (int64_t block = r0; block < r1; block += kRowBlock) {
    const int64_t end = block + kRowBlock < r1 ? block + kRowBlock : r1;
    for (int64_t r = block; r < end; ++r) {
      float* const to = packed + (r - block) * kLength;
      for (int64_t d = 0; d < s.depth; ++d) to[place_of<q>(d)] = load_one(a + r * s.a_row + d * s.a_depth);
      for (int64_t d = s.depth; d < kLength; ++d) to[place_of<q>(d)] = 0;
    }
    for (int64_t c = c0; c < c1; c += kPass) {
      const int64_t c_end = c1 - c > kPass ? c + kPass : c1;
      int64_t r = block;
      const auto rows = [&]<int Rows>(std::integral_constant<int, Rows>) ARK_BODY {
        for (; r + Rows <= end; r += Rows)
          if constexpr (q.block != 0)
            blocked_rows<Rows, s, q>(packed + (r - block) * kLength, kLength, b, scales, zeros, out, bias, r, c, c_end);
          else
            dequant_rows<Rows, s, q>(packed + (r - block) * kLength, kLength, b, scales, zeros, out, bias, r, c, c_end);
      };
      if constexpr (MostRows >= kTileRows && kTileRows > 1 && q.block == 0)
        rows(std::integral_constant<int, kTileRows>{});
      if constexpr (MostRows >= 4 && (kTileRows > 4 || (q.block != 0 && kTileRows > 1)))
        rows(std::integral_constant<int, 4>{});
      if constexpr (MostRows >= 2 && kTileRows > 2) rows(std::integral_constant<int, 2>{});
      rows(std::integral_constant<int, 1>{});
    }
  }
}

}  // namespace ark::cpu
