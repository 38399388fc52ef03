// The table of operators and the lane types of their arguments, and the expressions made from it. See emit_cpu_ops.hpp.
#include "compiler/emit/cpu/emit_cpu_ops.hpp"

#include <cmath>
#include <map>
#include <set>
#include <vector>

namespace ark::compiler {

namespace {

using Instruction = RowProgram::Instruction;
using Kind = Instruction::Kind;

// The lane types that an operator takes and returns.
enum class Rule : uint8_t {
  same,     // floats if the result or an operand is floating, else as the result
  compare,  // operands in lanes that hold both, returns a mask
  mask,     // masks
  floats,   // floats, returns a mask
  choose,   // a mask, then lanes of the result
  convert,  // cast
  whole,    // as `same`; integers only with a literal divisor
};
struct RowOp {
  const char* function;
  Rule rule;
};
const std::map<std::string, RowOp>& row_ops() {
  static const std::map<std::string, RowOp> ops = [] {
    std::map<std::string, RowOp> all;
    for (const char* name :
         {"add",   "sub",   "mul",     "div",         "neg",        "abs",         "maximum",     "minimum",
          "relu",  "silu",  "sigmoid", "sign",        "square",     "reciprocal",  "exp",         "exp2",
          "expm1", "log",   "log2",    "log10",       "log1p",      "sqrt",        "rsqrt",       "sin",
          "cos",   "tan",   "asin",    "acos",        "atan",       "atan2",       "sinh",        "cosh",
          "asinh", "acosh", "atanh",   "tanh",        "erf",        "erfc",        "floor",       "ceil",
          "trunc", "round", "pow",     "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "round_e4m3"})
      all[name] = {name, Rule::same};
    for (const char* name : {"floor_divide", "remainder", "fmod"}) all[name] = {name, Rule::whole};
    for (const char* name : {"eq", "ne", "lt", "le", "gt", "ge"}) all[name] = {name, Rule::compare};
    for (const char* name : {"isnan", "isinf", "isfinite"}) all[name] = {name, Rule::floats};
    all["logical_and"] = {"bitwise_and", Rule::mask};
    all["logical_or"] = {"bitwise_or", Rule::mask};
    all["logical_xor"] = {"bitwise_xor", Rule::mask};
    all["logical_not"] = {"bitwise_not", Rule::mask};
    all["where"] = {"select", Rule::choose};
    all["cast"] = all["copy"] = {"", Rule::convert};
    return all;
  }();
  return ops;
}
const std::set<std::string>& expensive_ops() {
  static const std::set<std::string> ops = {"exp",  "exp2", "expm1",   "log",   "log2",  "log10",     "log1p",
                                            "sin",  "cos",  "tan",     "asin",  "acos",  "atan",      "atan2",
                                            "sinh", "cosh", "tanh",    "asinh", "acosh", "atanh",     "erf",
                                            "erfc", "pow",  "sigmoid", "silu",  "fmod",  "remainder", "floor_divide"};
  return ops;
}

const char* conversion_to(const char* lanes) {
  return lanes[0] == 'F' ? "to_floats" : lanes[0] == 'M' ? "to_mask" : "to_ints";
}

}  // namespace

const char* lanes_of(ScalarType type) {
  return is_floating(type) || type == ScalarType::e4m3 ? "Floats" : type == ScalarType::boolean ? "Mask" : "Ints";
}

void RowExpressions::check(const Instruction& one) const {
  if (one.kind == Kind::op && row_ops().count(one.name) == 0) to_.refuse("it has no operator {}", one.name);
}

bool RowExpressions::expensive(const Instruction& one) {
  return one.kind == Kind::op && is_floating(one.type) && expensive_ops().count(one.name) != 0;
}

std::string RowExpressions::argument(int arg, const std::string& lanes) const {
  const Instruction& one = at(arg);
  const bool constant = one.kind == Kind::literal;
  const std::string text = constant ? cpp_lanes(literal(one)) : name(arg);
  if (lanes_of(one.type) == lanes) return text;
  return formatted("{}({})", conversion_to(lanes.c_str()), text);
}

Value RowExpressions::literal(const Instruction& one) const {
  Value value = to_.value(one.value);
  value.type = one.type;
  return value;
}

std::string RowExpressions::rounded(const Instruction& one, const std::string& expression) {
  if (one.type == ScalarType::bf16 || one.type == ScalarType::f16 || one.type == ScalarType::i32)
    return formatted("round_to({}, {}{{}})", expression, cpp_type(one.type));
  return expression;
}

// The lanes in which an operator of rule `same` or `whole` computes.
const char* RowExpressions::computed_lanes(const Instruction& one) const {
  for (const int arg : one.args)
    if (is_floating(at(arg).type)) return "Floats";
  if (one.type != ScalarType::boolean) return lanes_of(one.type);
  static const std::set<std::string> on_masks = {"add",         "mul",        "maximum",     "minimum",
                                                 "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"};
  return on_masks.count(one.name) != 0 ? "Mask" : "Ints";
}

// A literal exponent has its own function, as in PyTorch. (NaN would match any key of the map. Square roots are
// left to the graph: PyTorch uses them for some types only, and they differ at -0 and -infinity.)
void RowExpressions::known_power(const Instruction& one, const char* lanes, std::string& function, size_t& args) const {
  if (at(one.args.at(1)).kind == Kind::literal) {
    static const std::map<double, const char*> known = {{2, "square"}, {3, "cube"}, {-1, "reciprocal"}};
    const double power = literal(at(one.args[1])).literal;
    const auto found = known.find(power);
    if (!std::isnan(power) && found != known.end() && (lanes[0] == 'F' || power > 1)) {
      function = found->second;
      args = 1;
      return;
    }
  }
}

std::string RowExpressions::call(const Instruction& one) const {
  const RowOp& op = row_ops().at(one.name);
  const char* result = lanes_of(one.type);
  if (op.rule == Rule::convert) {
    // Convert directly: values outside int32 would wrap around in a conversion through int64.
    const bool narrows = one.type == ScalarType::i32 && is_floating(at(one.args.at(0)).type);
    if (narrows) return formatted("to_int32({})", argument(one.args[0], "Floats"));
    return rounded(one, argument(one.args.at(0), result));
  }
  const char* operands = result;  // the function's operands; it returns a mask or the same
  if (op.rule == Rule::same || op.rule == Rule::whole) operands = computed_lanes(one);
  if (op.rule == Rule::mask) operands = "Mask";
  if (op.rule == Rule::floats) operands = "Floats";
  if (op.rule == Rule::compare) {
    operands = "Mask";
    for (const int arg : one.args) {
      const char* lanes = lanes_of(at(arg).type);
      if (lanes[0] == 'F' || (lanes[0] == 'I' && operands[0] == 'M')) operands = lanes;
    }
  }
  if (op.rule == Rule::whole && operands[0] != 'F') {
    const Instruction& divisor = at(one.args.at(1));
    if (divisor.kind != Kind::literal || literal(divisor).literal == 0)
      to_.refuse("it divides integers by what is not a literal: a division by zero would end the process");
  }
  std::string function = op.function;
  size_t args = one.args.size();
  if (one.name == "pow") known_power(one, operands, function, args);
  // CUDA has functions of the same names in the global namespace.
  std::string text = formatted("{}{}(", to_.cuda() ? "ark::loop::" : "", function);
  for (size_t i = 0; i < args; ++i)
    text += (i == 0 ? "" : ", ") + argument(one.args[i], op.rule == Rule::choose && i == 0 ? "Mask" : operands);
  text += ")";
  const bool same = op.rule == Rule::same || op.rule == Rule::whole || op.rule == Rule::choose;
  const std::string given = same ? operands : "Mask";
  if (given != result) text = formatted("{}({})", conversion_to(result), text);
  return rounded(one, text);
}

}  // namespace ark::compiler
