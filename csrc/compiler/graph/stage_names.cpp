// Names row programs after the operators they contain. Names are for timelines and drawings; nothing depends on them.
#include "compiler/graph/stage_names.hpp"

#include <map>
#include <vector>

namespace ark::compiler {

std::string name_of_rows(const RowProgram& program) {
  using Kind = RowProgram::Instruction::Kind;
  std::map<std::string, int> ops, reductions;
  std::vector<std::string> order;
  int loads = 0;
  bool indexed = false;
  for (const auto& instruction : program.code) {
    if (instruction.kind == Kind::load && !instruction.scalar) ++loads;
    if (instruction.kind == Kind::index) indexed = true;
    if (instruction.kind == Kind::reduce) ++reductions[instruction.name];
    if (instruction.kind == Kind::op && instruction.name != "copy") ++ops[instruction.name];
    if ((instruction.kind != Kind::op && instruction.kind != Kind::reduce) || instruction.name == "copy") continue;
    if (order.empty() || order.back() != instruction.name) order.push_back(instruction.name);
  }
  const auto has = [&](const char* name) { return ops.count(name) > 0; };
  const int means = reductions["mean"] + reductions["sum"];
  const bool root = has("rsqrt") || has("sqrt");
  if (root && means == 1 && !has("sub")) return "rms_norm";
  if (root && means == 2 && has("sub")) return "layer_norm";
  if (reductions["amax"] > 0 && has("exp") && means > 0) return "softmax";
  if (reductions["argmax"] > 0) return "argmax";
  const bool pointwise = reductions["amax"] + reductions["amin"] + reductions["any"] + means == 0;
  const bool sigmoid = has("sigmoid") || (has("exp") && (has("div") || has("reciprocal")));
  if (pointwise && has("erf")) return "gelu";
  if (pointwise && has("tanh") && has("mul")) return "gelu";
  if (pointwise && sigmoid && has("mul") && loads >= 2) return "swiglu";
  if (pointwise && sigmoid) return "silu";
  if (pointwise && ops.size() == 1 && has("add") && loads >= 2) return "residual";
  if (pointwise && has("where") && indexed && has("neg") && has("mul") && has("add")) return "rotary";
  if (pointwise && has("where") && indexed) return "mask";
  if (pointwise && has("sin") && has("cos")) return "rotary_table";
  if (order.empty()) return indexed ? "iota" : loads > 0 ? "copy" : "fill";
  std::string name;
  for (size_t i = 0; i < order.size() && i < 4; ++i) name += (i > 0 ? "+" : "") + order[i];
  return order.size() > 4 ? name + "+..." : name;
}

}  // namespace ark::compiler
