// Sizes and names of element types and operations. The names are PyTorch's, for messages and records.
#include "dtype.hpp"

namespace ark {

namespace {

struct DTypeFacts {
  const char* name;
  size_t bytes;
};

constexpr DTypeFacts kDTypeFacts[] = {
    {"bool", 1},
    {"uint8", 1},
    {"int8", 1},
    {"uint16", 2},
    {"int16", 2},
    {"uint32", 4},
    {"int32", 4},
    {"uint64", 8},
    {"int64", 8},
    {"float16", 2},
    {"bfloat16", 2},
    {"float32", 4},
    {"float64", 8},
    {"float8_e4m3fn", 1},
    {"float8_e5m2", 1},
    {"float8_e4m3fnuz", 1},
    {"float8_e5m2fnuz", 1},
    {"float8_e8m0fnu", 1},
    {"complex32", 4},
    {"complex64", 8},
    {"complex128", 16},
    {"raw bytes", 1},
};
static_assert(sizeof(kDTypeFacts) / sizeof(kDTypeFacts[0]) == kDTypes);

constexpr const char* kOpNames[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
static_assert(sizeof(kOpNames) / sizeof(kOpNames[0]) == kReduceOps);

}  // namespace

// Values may come from another process. Unknown ones have size 0 and a name that says so.
size_t size_of(DType dtype) {
  const auto i = static_cast<size_t>(dtype);
  return i < kDTypes ? kDTypeFacts[i].bytes : 0;
}

const char* name_of(DType dtype) {
  const auto i = static_cast<size_t>(dtype);
  return i < kDTypes ? kDTypeFacts[i].name : "unknown dtype";
}

const char* name_of(ReduceOp op) {
  const auto i = static_cast<size_t>(op);
  return i < kReduceOps ? kOpNames[i] : "unknown operation";
}

}  // namespace ark
