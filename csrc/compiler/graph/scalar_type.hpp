// The types that a loop kernel computes with, and the types of quantized weights that products read. Operators on any
// other type fall back to Inductor.
#pragma once

#include <cstdint>
#include <string>

namespace ark::compiler {

// i8, u8 and e4m3 are codes of quantized weights (Codes in stage.hpp), and e4m3 also of rows that round_e4m3 makes.
// Only products read them.
enum class ScalarType : uint8_t { f32, bf16, f16, i64, i32, boolean, i8, u8, e4m3 };

constexpr int size_of(ScalarType type) {
  switch (type) {
    case ScalarType::f32:
    case ScalarType::i32: return 4;
    case ScalarType::bf16:
    case ScalarType::f16: return 2;
    case ScalarType::i64: return 8;
    case ScalarType::boolean:
    case ScalarType::i8:
    case ScalarType::u8:
    case ScalarType::e4m3: return 1;
  }
  return 0;
}
constexpr bool is_floating(ScalarType type) {
  return type == ScalarType::f32 || type == ScalarType::bf16 || type == ScalarType::f16;
}
constexpr bool is_code(ScalarType type) {
  return type == ScalarType::i8 || type == ScalarType::u8 || type == ScalarType::e4m3;
}
const char* name_of(ScalarType type);
// "float32", "bfloat16", "float16", "int64", "int32", "bool", "int8", "uint8", "float8_e4m3fn"
ScalarType scalar_type(const std::string& name);

}  // namespace ark::compiler
