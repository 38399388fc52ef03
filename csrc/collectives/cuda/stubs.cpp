// The texts behind stubs.hpp. A new kernel header adds its stub here.
#include "collectives/cuda/stubs.hpp"

#include "jit/probe.hpp"

namespace ark {

namespace {

const char* const kFormats[] = {"BFloat16", "Float16", "Float32"};

DType scalar_of(DType dtype) {
  return dtype == DType::c32 ? DType::f16 : dtype == DType::c64 ? DType::f32 : dtype;
}

std::string rule_text(RuleKind rule) {
  if (rule == RuleKind::any) return "ark::device::GenericRule";
  return std::string("ark::device::SumRule<ark::device::") + kFormats[static_cast<int>(rule)] + ">";
}

std::string entry(const std::string& name, int threads, const std::string& params, const std::string& call) {
  return "extern \"C\" __global__ void __launch_bounds__(" + std::to_string(threads) + ") " + name +
         "(\n    const __grid_constant__ ark::device::" + params + " p) {\n  ark::device::" + call + ";\n}\n";
}

}  // namespace

RuleKind rule_of(DType dtype, ReduceOp op) {
  if (op != ReduceOp::sum && op != ReduceOp::avg) return RuleKind::any;
  switch (scalar_of(dtype)) {
    case DType::bf16: return RuleKind::bf16;
    case DType::f16: return RuleKind::f16;
    case DType::f32: return RuleKind::f32;
    default: return RuleKind::any;
  }
}

std::string reduce_stub(RuleKind rule, int ranks, int rank) {
  const bool any = rule == RuleKind::any;
  const std::string size = std::to_string(ranks), made = any ? "Rule{p.dtype, p.op}" : "Rule{}";
  std::string text;
  for (const char* header : {"add", "one_shot", "two_shot"})
    text += std::string("#include \"cuda/") + header + ".cuh\"\n";
  text += "using Rule = " + rule_text(rule) + ";\n";
  text += entry("one_shot", 512, "OneShotParams",
                "one_shot_all_reduce<Rule, " + size + ", " + std::to_string(rank) + ">(p, " + made + ")");
  text += entry("two_shot", 256, "TwoShotParams", "two_shot<Rule, " + size + ">(p, " + made + ")");
  text += entry("add", 256, "AddParams", "add_parts<Rule, " + size + ">(p, " + made + ")");
  return text;
}

std::string bulk_reduce_stub(RuleKind rule, int ranks) {
  const bool any = rule == RuleKind::any;
  const std::string size = std::to_string(ranks), made = any ? "Rule{p.dtype, p.op}" : "Rule{}";
  return "#include \"cuda/bulk.cuh\"\nusing Rule = " + rule_text(rule) + ";\n" +
         entry("bulk", 416, "BulkParams", "bulk<Rule, " + size + ", true>(p, " + made + ")");
}

std::string bulk_move_stub(int ranks) {
  return "#include \"cuda/bulk.cuh\"\n" +
         entry("bulk", 416, "BulkParams",
               "bulk<ark::device::SumRule<ark::device::Float32>, " + std::to_string(ranks) + ", false>(p, {})");
}

std::string move_stub() {
  return "#include \"cuda/move.cuh\"\n" + entry("move", 512, "MoveParams", "move(p)");
}

std::vector<Stub> representative_stubs() {
  std::vector<Stub> stubs;
  stubs.push_back({"probe", jit::probe_stub()});
  stubs.push_back({"move", move_stub()});
  for (RuleKind rule : {RuleKind::bf16, RuleKind::f16, RuleKind::f32, RuleKind::any})
    stubs.push_back({"reduce_" + std::to_string(static_cast<int>(rule)) + "_2", reduce_stub(rule, 2, 0)});
  stubs.push_back({"reduce_bf16_4", reduce_stub(RuleKind::bf16, 4, 1)});
  stubs.push_back({"reduce_bf16_8", reduce_stub(RuleKind::bf16, 8, 7)});
  stubs.push_back({"reduce_any_1", reduce_stub(RuleKind::any, 1, 0)});
  stubs.push_back({"bulk_reduce_bf16_2", bulk_reduce_stub(RuleKind::bf16, 2), 90});
  stubs.push_back({"bulk_reduce_any_4", bulk_reduce_stub(RuleKind::any, 4), 90});
  stubs.push_back({"bulk_reduce_f32_8", bulk_reduce_stub(RuleKind::f32, 8), 90});
  stubs.push_back({"bulk_move_4", bulk_move_stub(4), 90});
  return stubs;
}

}  // namespace ark
