// Tests sizes, names, and the numbers that travel between processes.
#include "util/dtype.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace ark {
namespace {

TEST(DType, SizesAndNames) {
  const struct {
    DType dtype;
    int value;
    const char* name;
    size_t bytes;
  } expected[] = {
      {DType::boolean, 0, "bool", 1},
      {DType::u8, 1, "uint8", 1},
      {DType::i8, 2, "int8", 1},
      {DType::u16, 3, "uint16", 2},
      {DType::i16, 4, "int16", 2},
      {DType::u32, 5, "uint32", 4},
      {DType::i32, 6, "int32", 4},
      {DType::u64, 7, "uint64", 8},
      {DType::i64, 8, "int64", 8},
      {DType::f16, 9, "float16", 2},
      {DType::bf16, 10, "bfloat16", 2},
      {DType::f32, 11, "float32", 4},
      {DType::f64, 12, "float64", 8},
      {DType::f8_e4m3fn, 13, "float8_e4m3fn", 1},
      {DType::f8_e5m2, 14, "float8_e5m2", 1},
      {DType::f8_e4m3fnuz, 15, "float8_e4m3fnuz", 1},
      {DType::f8_e5m2fnuz, 16, "float8_e5m2fnuz", 1},
      {DType::f8_e8m0fnu, 17, "float8_e8m0fnu", 1},
      {DType::c32, 18, "complex32", 4},
      {DType::c64, 19, "complex64", 8},
      {DType::c128, 20, "complex128", 16},
      {DType::raw8, 21, "raw bytes", 1},
  };
  ASSERT_EQ(std::size(expected), static_cast<size_t>(kDTypes));
  for (const auto& e : expected) {
    EXPECT_EQ(static_cast<int>(e.dtype), e.value) << e.name;
    EXPECT_STREQ(name_of(e.dtype), e.name);
    EXPECT_EQ(size_of(e.dtype), e.bytes) << e.name;
  }
}

TEST(DType, OperationsHaveNamesOfTheirOwn) {
  std::set<std::string> names;
  for (int o = 0; o < kReduceOps; o++) names.insert(name_of(static_cast<ReduceOp>(o)));
  EXPECT_EQ(names.size(), static_cast<size_t>(kReduceOps));
  EXPECT_STREQ(name_of(ReduceOp::sum), "SUM");
  EXPECT_STREQ(name_of(ReduceOp::premul_sum), "PREMUL_SUM");
}

TEST(DType, UnknownValuesAreNamedAsSuch) {
  EXPECT_EQ(size_of(static_cast<DType>(kDTypes)), 0u);
  EXPECT_STREQ(name_of(static_cast<DType>(200)), "unknown dtype");
  EXPECT_STREQ(name_of(static_cast<ReduceOp>(200)), "unknown operation");
}

}  // namespace
}  // namespace ark
