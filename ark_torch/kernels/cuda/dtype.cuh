// Element types and reduce operations in device code, and the layouts of the small float formats.
//
// The values equal those of csrc/util/dtype.hpp, which includes <cstdint> and so cannot be compiled by NVRTC;
// tests/csrc/kernels/reduce_test.cpp asserts that. Kernels get them as arguments, or as constants of their source, in
// which case the compiler folds every switch on them.
#pragma once

#include "protocol/base.hpp"

namespace ark::device {

enum class DType : uint8 {
  boolean = 0,
  u8 = 1,
  i8 = 2,
  u16 = 3,
  i16 = 4,
  u32 = 5,
  i32 = 6,
  u64 = 7,
  i64 = 8,
  f16 = 9,
  bf16 = 10,
  f32 = 11,
  f64 = 12,
  f8_e4m3fn = 13,
  f8_e5m2 = 14,
  f8_e4m3fnuz = 15,
  f8_e5m2fnuz = 16,
  f8_e8m0fnu = 17,
  c32 = 18,
  c64 = 19,
  c128 = 20,
  raw8 = 21,
};

enum class ReduceOp : uint8 {
  sum = 0,
  avg = 1,
  product = 2,
  min = 3,
  max = 4,
  band = 5,
  bor = 6,
  bxor = 7,
  premul_sum = 8,
};

// The type of one scalar. A complex number is two of them, which only a product combines.
ARK_DEVICE_INLINE constexpr DType scalar_of(DType dtype) {
  switch (dtype) {
    case DType::c32: return DType::f16;
    case DType::c64: return DType::f32;
    case DType::c128: return DType::f64;
    default: return dtype;
  }
}

ARK_DEVICE_INLINE constexpr bool is_complex(DType dtype) {
  return dtype == DType::c32 || dtype == DType::c64 || dtype == DType::c128;
}
ARK_DEVICE_INLINE constexpr bool is_integer(DType dtype) {  // including bool
  return dtype <= DType::i64;
}
ARK_DEVICE_INLINE constexpr bool is_signed(DType dtype) {
  return dtype == DType::i8 || dtype == DType::i16 || dtype == DType::i32 || dtype == DType::i64;
}

// Bytes of one scalar.
ARK_DEVICE_INLINE constexpr int scalar_bytes(DType dtype) {
  switch (scalar_of(dtype)) {
    case DType::u16:
    case DType::i16:
    case DType::f16:
    case DType::bf16: return 2;
    case DType::u32:
    case DType::i32:
    case DType::f32: return 4;
    case DType::u64:
    case DType::i64:
    case DType::f64: return 8;
    default: return 1;
  }
}

// Sign, exponent, mantissa: float16 and the four signed float8 formats.
struct SmallFloat {
  int exponent, mantissa, bias;
  uint32 nan;          // the NaN of results
  uint32 overflow;     // the code for magnitudes above the range
  bool infinities;     // magnitudes from `overflow` on are infinity and NaNs (IEEE 754); else there is one NaN
  bool negative_zero;  // false: its code is the NaN
};

ARK_DEVICE_INLINE constexpr SmallFloat layout_of(DType dtype) {
  switch (dtype) {
    case DType::f8_e4m3fn: return {4, 3, 7, 0x7f, 0x7e, false, true};  // overflow: the largest value
    case DType::f8_e5m2: return {5, 2, 15, 0x7f, 0x7c, true, true};
    case DType::f8_e4m3fnuz: return {4, 3, 8, 0x80, 0x80, false, false};
    case DType::f8_e5m2fnuz: return {5, 2, 16, 0x80, 0x80, false, false};
    default: return {5, 10, 15, 0x7e00, 0x7c00, true, true};  // f16
  }
}

}  // namespace ark::device
