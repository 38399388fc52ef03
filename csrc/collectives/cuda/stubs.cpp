// The texts behind stubs.hpp. A new kernel header adds its stub here.
#include "collectives/cuda/stubs.hpp"

#include "collectives/cuda/fused_stubs.hpp"
#include "cuda/bulk_two_shot.cuh"
#include "cuda/compressed_codes.cuh"
#include "cuda/relay.cuh"
#include "cuda/two_shot.cuh"
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

std::string made_of(RuleKind rule) {
  return rule == RuleKind::any ? "Rule{p.dtype, p.op}" : "Rule{}";
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
  const std::string size = std::to_string(ranks), made = made_of(rule);
  return "#include \"cuda/add.cuh\"\n#include \"cuda/one_shot.cuh\"\nusing Rule = " + rule_text(rule) + ";\n" +
         entry("one_shot", 512, "OneShotParams",
               "one_shot_all_reduce<Rule, " + size + ", " + std::to_string(rank) + ">(p, " + made + ")") +
         entry("add", 256, "AddParams", "add_parts<Rule, " + size + ">(p, " + made + ")");
}

std::string two_shot_stub(RuleKind rule, int ranks, int rank, bool chunked) {
  return "#include \"cuda/two_shot.cuh\"\nusing Rule = " + rule_text(rule) + ";\n" +
         entry("two_shot", device::ring_lanes(ranks) * device::ring_roles(ranks) * 32, "TwoShotParams",
               std::string("two_shot<ark::device::") + (chunked ? "Chunks" : "Lines") + ", Rule, " +
                   std::to_string(ranks) + ", " + std::to_string(rank) + ">(p, " + made_of(rule) + ")");
}

std::string bulk_stub(RuleKind rule, int ranks, int rank) {
  return "#include \"cuda/bulk_two_shot.cuh\"\nusing Rule = " + rule_text(rule) + ";\n" +
         entry("bulk_two_shot", device::kBulkThreads, "TwoShotParams",
               "bulk_two_shot<Rule, " + std::to_string(ranks) + ", " + std::to_string(rank) + ">(p, " + made_of(rule) +
                   ")");
}

std::string move_stub() {
  return "#include \"cuda/move.cuh\"\n" + entry("move", 480, "MoveParams", "move(p)");
}

std::string relay_stub() {
  return "#include \"cuda/relay.cuh\"\n" + entry("relay", 480, "RelayParams", "relay(p)");
}

std::string compressed_stub(const CompressedKind& kind, const std::string& name) {
  const size_t fed = name.find("_fed");
  std::string call =
      name.substr(0, fed) + "<ark::device::" + kFormats[static_cast<int>(rule_of(kind.dtype, ReduceOp::sum))] +
      ", ark::quantize::Format::" + (kind.format == quantize::Format::fp8 && kind.bits != 0 ? "fp8, " : "uniform, ") +
      std::to_string(kind.bits) + (kind.wide ? ", true" : ", false");
  if (name != "compressed_sum") call += fed != std::string::npos ? ", true" : ", false";
  return "#include \"cuda/compressed.cuh\"\n" + entry(name, device::kCodeThreads, "CodeParams", call + ">(p)");
}

std::vector<Stub> representative_stubs() {
  std::vector<Stub> stubs;
  stubs.push_back({"probe", jit::probe_stub()});
  stubs.push_back({"move", move_stub()});
  stubs.push_back({"relay", relay_stub()});
  const char* const names[] = {"bf16", "f16", "f32", "any"};
  const auto add = [&](RuleKind rule, int ranks, int rank) {
    const std::string name = std::string("_") + names[static_cast<int>(rule)] + "_" + std::to_string(ranks);
    stubs.push_back({"reduce" + name, reduce_stub(rule, ranks, rank)});
    stubs.push_back({"lines" + name, two_shot_stub(rule, ranks, rank, false)});
    stubs.push_back({"chunks" + name, two_shot_stub(rule, ranks, rank, true)});
    stubs.push_back({"bulk" + name, bulk_stub(rule, ranks, rank), 90});
  };
  for (RuleKind rule : {RuleKind::bf16, RuleKind::f16, RuleKind::f32, RuleKind::any}) add(rule, 2, 0);
  add(RuleKind::bf16, 4, 1);
  add(RuleKind::bf16, 8, 7);
  stubs.push_back({"lines_any_1", two_shot_stub(RuleKind::any, 1, 0, false)});
  using quantize::Format;
  stubs.push_back(
      {"compressed_bfloat16_4", compressed_stub({DType::bf16, Format::uniform, 4, false}, "compressed_encode")});
  stubs.push_back(
      {"compressed_float32_3_wide", compressed_stub({DType::f32, Format::uniform, 3, true}, "compressed_reduce_fed")});
  stubs.push_back({"compressed_float16_fp8", compressed_stub({DType::f16, Format::fp8, 8, false}, "compressed_sum")});
  stubs.push_back(
      {"compressed_float32_exact", compressed_stub({DType::f32, Format::uniform, 0, false}, "compressed_encode_fed")});
  for (Stub& stub : representative_fused_stubs()) stubs.push_back(std::move(stub));
  return stubs;
}

}  // namespace ark
