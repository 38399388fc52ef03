// The types that a loop kernel computes with. Others fall back.
#pragma once

#include <cstdint>
#include <string>

namespace ark::compiler {

enum class ScalarType : uint8_t { f32, bf16, f16, i64, i32, boolean };

constexpr int size_of(ScalarType type) {
  switch (type) {
    case ScalarType::f32:
    case ScalarType::i32: return 4;
    case ScalarType::bf16:
    case ScalarType::f16: return 2;
    case ScalarType::i64: return 8;
    case ScalarType::boolean: return 1;
  }
  return 0;
}
constexpr bool is_floating(ScalarType type) {
  return type == ScalarType::f32 || type == ScalarType::bf16 || type == ScalarType::f16;
}
const char* name_of(ScalarType type);
ScalarType scalar_type(const std::string& name);  // "float32", "bfloat16", "float16", "int64", "int32", "bool"

}  // namespace ark::compiler
