// The reference for reductions, independent of the kernels: scalar float64 and integer arithmetic, and rounding by
// searching a table of all values of a format.
//
// A float32 sum, product or quotient that is computed in float64 and rounded to float32 equals the float32 operation
// (53 bits are more than twice 24 plus 2). So nothing here depends on how the compiler treats float32.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <vector>

#include "collectives/cpu/reduce/reduce.hpp"

namespace ark::reference {

struct Layout {  // of a float format of at most 16 bits
  int exponent_bits, mantissa_bits, bias;
  uint32_t nan;        // the NaN in results
  uint32_t overflow;   // result for positive values above the range
  bool negative_zero;  // false: the code of -0 is NaN
};

inline Layout layout_of(DType dtype) {
  switch (dtype) {
    case DType::f16: return {5, 10, 15, 0x7e00, 0x7c00, true};
    case DType::bf16: return {8, 7, 127, 0x7fc0, 0x7f80, true};
    case DType::f8_e4m3fn: return {4, 3, 7, 0x7f, 0x7e, true};
    case DType::f8_e5m2: return {5, 2, 15, 0x7f, 0x7c, true};
    case DType::f8_e4m3fnuz: return {4, 3, 8, 0x80, 0x80, false};
    default: return {5, 2, 16, 0x80, 0x80, false};  // f8_e5m2fnuz
  }
}

// The largest code that is a finite number, without its sign.
inline uint32_t largest_of(DType dtype) {
  const Layout l = layout_of(dtype);
  if (!l.negative_zero) return 0x7f;
  return dtype == DType::f8_e4m3fn ? 0x7e : l.overflow - 1;
}

inline double decode_small(DType dtype, uint32_t code) {
  const Layout l = layout_of(dtype);
  const uint32_t sign = 1u << (l.exponent_bits + l.mantissa_bits);
  const uint32_t magnitude = code & (sign - 1);
  const double direction = code & sign ? -1.0 : 1.0;
  if (!l.negative_zero && code == sign) return std::numeric_limits<double>::quiet_NaN();
  if (magnitude > largest_of(dtype)) {
    const bool infinite = dtype != DType::f8_e4m3fn && magnitude == l.overflow;
    return infinite ? direction * HUGE_VAL : std::numeric_limits<double>::quiet_NaN();
  }
  const int exponent = static_cast<int>(magnitude >> l.mantissa_bits);
  const double fraction = magnitude & ((1u << l.mantissa_bits) - 1);
  const double one = std::ldexp(1.0, l.mantissa_bits);
  return direction *
         (exponent == 0 ? std::ldexp(fraction / one, 1 - l.bias) : std::ldexp(1 + fraction / one, exponent - l.bias));
}

inline uint32_t encode_small(DType dtype, double value) {
  const Layout l = layout_of(dtype);
  const uint32_t largest = largest_of(dtype);
  static std::map<DType, std::vector<double>> tables;  // values of all finite codes, ascending
  std::vector<double>& table = tables[dtype];
  if (table.empty()) {
    for (uint32_t code = 0; code <= largest; code++) table.push_back(decode_small(dtype, code));
  }
  if (std::isnan(value)) return l.nan;
  const double magnitude = std::fabs(value);
  const double above = table[largest] + (table[largest] - table[largest - 1]);  // one step past it
  uint32_t code;
  if (magnitude >= above) {
    code = l.overflow;
  } else {
    code = static_cast<uint32_t>(std::upper_bound(table.begin(), table.end(), magnitude) - table.begin()) - 1;
    const double next = code == largest ? above : table[code + 1];
    const double down = magnitude - table[code], up = next - magnitude;
    if (up < down || (up == down && (code & 1))) code = code == largest ? l.overflow : code + 1;
  }
  const uint32_t sign = 1u << (l.exponent_bits + l.mantissa_bits);
  if (!std::signbit(value) || (!l.negative_zero && code == 0)) return code;
  return code | sign;
}

// e8m0fnu holds 2^(code - 127), and 255 is NaN. Here only powers of two are rounded (products, MIN, MAX).
inline double decode_scale(uint32_t code) {
  return code == 255 ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, static_cast<int>(code) - 127);
}
inline uint32_t encode_scale(double value) {
  if (!std::isfinite(value)) return 255;
  return value == 0 ? 0 : static_cast<uint32_t>(std::max(std::ilogb(value) + 127, 0));
}

inline bool is_float(DType dtype) {
  return dtype >= DType::f16 && dtype <= DType::f8_e8m0fnu;
}
inline bool is_complex(DType dtype) {
  return dtype >= DType::c32 && dtype <= DType::c128;
}
inline bool is_signed(DType dtype) {
  return dtype == DType::i8 || dtype == DType::i16 || dtype == DType::i32 || dtype == DType::i64;
}
// The type of one scalar. A complex number is two of them.
inline DType scalar_of(DType dtype) {
  return dtype == DType::c32    ? DType::f16
         : dtype == DType::c64  ? DType::f32
         : dtype == DType::c128 ? DType::f64
                                : dtype;
}

inline double read(DType dtype, const uint8_t* at) {
  if (dtype == DType::f64) {
    double value;
    std::memcpy(&value, at, 8);
    return value;
  }
  if (dtype == DType::f32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  uint32_t code = 0;
  std::memcpy(&code, at, size_of(dtype));
  return dtype == DType::f8_e8m0fnu ? decode_scale(code) : decode_small(dtype, code);
}

inline void write(DType dtype, uint8_t* at, double value) {
  if (dtype == DType::f64) {
    const uint64_t bits = std::isnan(value) ? 0x7ff8000000000000 : std::bit_cast<uint64_t>(value);
    std::memcpy(at, &bits, 8);
  } else if (dtype == DType::f32) {
    const uint32_t bits = std::isnan(value) ? 0x7fc00000 : std::bit_cast<uint32_t>(static_cast<float>(value));
    std::memcpy(at, &bits, 4);
  } else {
    const uint32_t code = dtype == DType::f8_e8m0fnu ? encode_scale(value) : encode_small(dtype, value);
    std::memcpy(at, &code, size_of(dtype));  // the whole library assumes little endian
  }
}

inline double extremum(bool max, double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<double>::quiet_NaN();
  if (a == b) return std::signbit(a) == max ? b : a;  // -0 is smaller than +0
  return (a < b) == max ? b : a;
}

// Reduces one element of every rank (`from[r]`) into `to`.
inline void reduce_float(DType dtype, ReduceOp op, const std::vector<const uint8_t*>& from, const double* factors,
                         uint8_t* to) {
  const bool wide = dtype == DType::f64;
  const auto round = [wide](double x) { return wide ? x : static_cast<double>(static_cast<float>(x)); };
  double result = 0;
  for (size_t r = 0; r < from.size(); r++) {
    double x = read(dtype, from[r]);
    if (op == ReduceOp::premul_sum) x = round(x * round(factors[r]));
    if (r == 0) result = x;
    if (r == 0) continue;
    switch (op) {
      case ReduceOp::product: result = round(result * x); break;
      case ReduceOp::min: result = extremum(false, result, x); break;
      case ReduceOp::max: result = extremum(true, result, x); break;
      default: result = round(result + x);
    }
  }
  if (op == ReduceOp::avg) result = round(result / static_cast<double>(from.size()));
  write(dtype, to, result);
}

inline void multiply_complex(DType part, const std::vector<const uint8_t*>& from, uint8_t* to) {
  const size_t bytes = size_of(part);
  const bool wide = part == DType::f64;
  const auto round = [wide](double x) { return wide ? x : static_cast<double>(static_cast<float>(x)); };
  double real = read(part, from[0]), imaginary = read(part, from[0] + bytes);
  for (size_t r = 1; r < from.size(); r++) {
    const double a = real, b = imaginary, c = read(part, from[r]), d = read(part, from[r] + bytes);
    real = round(round(a * c) - round(b * d));
    imaginary = round(round(a * d) + round(b * c));
  }
  write(part, to, real);
  write(part, to + bytes, imaginary);
}

inline void reduce_integer(DType dtype, ReduceOp op, const std::vector<const uint8_t*>& from, uint8_t* to) {
  const size_t bytes = size_of(dtype);
  const int unused = 64 - 8 * static_cast<int>(bytes);
  uint64_t result = 0;
  for (size_t r = 0; r < from.size(); r++) {
    uint64_t x = 0;
    std::memcpy(&x, from[r], bytes);
    if (is_signed(dtype)) x = static_cast<uint64_t>(static_cast<int64_t>(x << unused) >> unused);
    if (dtype == DType::boolean) x = x != 0;
    if (r == 0) result = x;
    if (r == 0) continue;
    const bool less = is_signed(dtype) ? static_cast<int64_t>(x) < static_cast<int64_t>(result) : x < result;
    switch (op) {
      case ReduceOp::sum: result = dtype == DType::boolean ? (result | x) : result + x; break;
      case ReduceOp::product: result *= x; break;
      case ReduceOp::min: result = less ? x : result; break;
      case ReduceOp::max: result = less ? result : x; break;
      case ReduceOp::band: result &= x; break;
      case ReduceOp::bor: result |= x; break;
      default: result ^= x;
    }
  }
  std::memcpy(to, &result, bytes);
}

// Reduces the whole buffer.
inline std::vector<uint8_t> reduce(DType dtype, ReduceOp op, const std::vector<const uint8_t*>& sources, size_t count,
                                   const double* factors) {
  std::vector<uint8_t> out(count * size_of(dtype));
  const DType part = scalar_of(dtype);
  const bool pairs = is_complex(dtype) && op == ReduceOp::product;
  const size_t step = pairs ? size_of(dtype) : size_of(part);
  std::vector<const uint8_t*> from(sources.size());
  for (size_t at = 0; at < out.size(); at += step) {
    for (size_t r = 0; r < from.size(); r++) from[r] = sources[r] + at;
    if (pairs) {
      multiply_complex(part, from, out.data() + at);
    } else if (is_float(part)) {
      reduce_float(part, op, from, factors, out.data() + at);
    } else {
      reduce_integer(dtype, op, from, out.data() + at);
    }
  }
  return out;
}

}  // namespace ark::reference
