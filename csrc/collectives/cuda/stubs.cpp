// The texts behind stubs.hpp. A new kernel header adds its stub here.
#include "collectives/cuda/stubs.hpp"

#include "jit/probe.hpp"

namespace ark {

namespace {

const char* const kFormats[] = {"BFloat16", "Float16", "Float32"};

DType scalar_of(DType dtype) {
  return dtype == DType::c32 ? DType::f16 : dtype == DType::c64 ? DType::f32 : dtype;
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
  const std::string type =
      any ? "ark::device::GenericRule"
          : std::string("ark::device::SumRule<ark::device::") + kFormats[static_cast<int>(rule)] + ">";
  const std::string made = any ? "Rule{p.dtype, p.op}" : "Rule{}";
  const std::string size = std::to_string(ranks);
  return "#include \"cuda/one_shot.cuh\"\n"
         "#include \"cuda/two_shot.cuh\"\n"
         "using Rule = " +
         type + ";\n" +
         "extern \"C\" __global__ void __launch_bounds__(512) one_shot(const __grid_constant__ "
         "ark::device::OneShotParams "
         "p) {\n"
         "  ark::device::one_shot_all_reduce<Rule, " +
         size + ", " + std::to_string(rank) + ">(p, " + made +
         ");\n}\n"
         "extern \"C\" __global__ void __launch_bounds__(256) two_shot(const __grid_constant__ "
         "ark::device::TwoShotParams "
         "p) {\n"
         "  ark::device::two_shot<Rule, " +
         size + ">(p, " + made + ");\n}\n";
}

std::string move_stub() {
  return "#include \"cuda/move.cuh\"\n"
         "extern \"C\" __global__ void __launch_bounds__(512) move(const __grid_constant__ ark::device::MoveParams p) "
         "{\n"
         "  ark::device::move(p);\n}\n";
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
  return stubs;
}

}  // namespace ark
