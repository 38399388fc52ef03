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
  }
  return "unknown";
}

ScalarType scalar_type(const std::string& name) {
  for (ScalarType type :
       {ScalarType::f32, ScalarType::bf16, ScalarType::f16, ScalarType::i64, ScalarType::i32, ScalarType::boolean}) {
    if (name == name_of(type)) return type;
  }
  ErrorContext context;
  context.remedy = "Loop kernels compute with float32, bfloat16, float16, int64, int32 and bool.";
  throw Error(ErrorKind::type_error, "a plan has no type named '" + name + "'", context);
}

}  // namespace ark::compiler
