// The library's element types and reduce operations, without torch headers.
//
// The values are fixed, because operation descriptors carry them between processes of a job.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ark {

enum class DType : uint8_t {
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
  c32 = 18,   // two f16
  c64 = 19,   // two f32
  c128 = 20,  // two f64
  raw8 = 21,  // one opaque byte that can be moved but not reduced
};
inline constexpr int kDTypes = 22;

enum class ReduceOp : uint8_t {
  sum = 0,
  avg = 1,
  product = 2,
  min = 3,
  max = 4,
  band = 5,
  bor = 6,
  bxor = 7,
  premul_sum = 8,  // multiplies every rank's input by its own factor, then sums
};
inline constexpr int kReduceOps = 9;

size_t size_of(DType dtype);       // bytes per element
const char* name_of(DType dtype);  // PyTorch's name: "bfloat16"
const char* name_of(ReduceOp op);  // "SUM"

}  // namespace ark
