// The table of pointwise operators. Each computes PyTorch's function of the same name. It computes in float32 if the
// result or an operand (other than the condition of `where`) is floating, else in int64, and rounds to the result's
// type. floor_divide and remainder round towards minus infinity (remainder has the divisor's sign), `round` rounds
// halves to even, maximum and minimum propagate NaN, a cast from floating to integer truncates, a cast to bool is != 0,
// round_e4m3 rounds to a number of float8_e4m3fn (NaN beyond 464).
#include <string>
#include <unordered_map>
#include <vector>

#include "compiler/graph/graph.hpp"

namespace ark::compiler {

const std::vector<PointwiseOp>& pointwise_ops() {
  static const std::vector<PointwiseOp> ops = {
      {"neg", 1, false},         {"abs", 1, false},         {"exp", 1, false},
      {"log", 1, false},         {"log1p", 1, false},       {"expm1", 1, false},
      {"sqrt", 1, false},        {"rsqrt", 1, false},       {"reciprocal", 1, false},
      {"sin", 1, false},         {"cos", 1, false},         {"tanh", 1, false},
      {"erf", 1, false},         {"sigmoid", 1, false},     {"exp2", 1, false},
      {"log2", 1, false},        {"log10", 1, false},       {"erfc", 1, false},
      {"tan", 1, false},         {"asin", 1, false},        {"acos", 1, false},
      {"atan", 1, false},        {"sinh", 1, false},        {"cosh", 1, false},
      {"asinh", 1, false},       {"acosh", 1, false},       {"atanh", 1, false},
      {"relu", 1, false},        {"floor", 1, false},       {"ceil", 1, false},
      {"round", 1, false},       {"trunc", 1, false},       {"sign", 1, false},
      {"logical_not", 1, true},  {"bitwise_not", 1, false}, {"isnan", 1, true},
      {"isinf", 1, true},        {"add", 2, false},         {"sub", 2, false},
      {"mul", 2, false},         {"div", 2, false},         {"floor_divide", 2, false},
      {"remainder", 2, false},   {"fmod", 2, false},        {"atan2", 2, false},
      {"pow", 2, false},         {"maximum", 2, false},     {"minimum", 2, false},
      {"eq", 2, true},           {"ne", 2, true},           {"lt", 2, true},
      {"le", 2, true},           {"gt", 2, true},           {"ge", 2, true},
      {"logical_and", 2, true},  {"logical_or", 2, true},   {"logical_xor", 2, true},
      {"bitwise_and", 2, false}, {"bitwise_or", 2, false},  {"bitwise_xor", 2, false},
      {"where", 3, false},       {"cast", 1, false},        {"copy", 1, false},
      {"round_e4m3", 1, false},
  };
  return ops;
}

const PointwiseOp* find_pointwise(const std::string& name) {
  static const std::unordered_map<std::string, const PointwiseOp*> index = [] {
    std::unordered_map<std::string, const PointwiseOp*> made;
    for (const PointwiseOp& op : pointwise_ops()) made.emplace(op.name, &op);
    return made;
  }();
  const auto found = index.find(name);
  return found == index.end() ? nullptr : found->second;
}

}  // namespace ark::compiler
