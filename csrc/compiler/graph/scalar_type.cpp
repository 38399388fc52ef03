// Names of types, as PyTorch writes them without "torch.".
#include "compiler/graph/scalar_type.hpp"

#include "util/error.hpp"

namespace ark::compiler {

const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::f32: return "float32";
    case ScalarType::bf16: return "bfloat16";
    case ScalarType::f16: return "float16";
    case ScalarType::i64: return "int64";
    case ScalarType::i32: return "int32";
    case ScalarType::boolean: return "bool";
    case ScalarType::i8: return "int8";
    case ScalarType::u8: return "uint8";
    case ScalarType::e4m3: return "float8_e4m3fn";
  }
  return "unknown";
}

ScalarType scalar_type(const std::string& name) {
  for (ScalarType type : {ScalarType::f32, ScalarType::bf16, ScalarType::f16, ScalarType::i64, ScalarType::i32,
                          ScalarType::boolean, ScalarType::i8, ScalarType::u8, ScalarType::e4m3}) {
    if (name == name_of(type)) return type;
  }
  ErrorContext context;
  context.remedy =
      "Loop kernels compute with float32, bfloat16, float16, int64, int32 and bool, and read weights of int8, uint8 "
      "and "
      "float8_e4m3fn.";
  throw Error(ErrorKind::type_error, "a plan has no type named '" + name + "'", context);
}

}  // namespace ark::compiler
