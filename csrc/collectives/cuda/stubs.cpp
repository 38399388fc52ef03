// The source texts of stubs.hpp. A new kernel for collectives is a row of kGroup; lists and launches follow from it.
#include "collectives/cuda/stubs.hpp"

#include <algorithm>
#include <iterator>

#include "collectives/cuda/fused_stubs.hpp"
#include "cuda/bulk_move.cuh"
#include "cuda/bulk_two_shot.cuh"
#include "cuda/compressed_codes.cuh"
#include "cuda/peer_test.cuh"
#include "cuda/relay.cuh"
#include "cuda/rendezvous.cuh"
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

std::string move_stub(RuleKind, int, int) {
  return "#include \"cuda/move.cuh\"\n#include \"cuda/rendezvous.cuh\"\n" +
         entry("move", 480, "MoveParams", "move(p)") + entry("rendezvous", 32, "RendezvousParams", "rendezvous(p)");
}

std::string reduce_stub(RuleKind rule, int ranks, int rank) {
  const std::string size = std::to_string(ranks), made = made_of(rule);
  return "#include \"cuda/add.cuh\"\n#include \"cuda/one_shot.cuh\"\nusing Rule = " + rule_text(rule) + ";\n" +
         entry("one_shot", 512, "OneShotParams",
               "one_shot_all_reduce<Rule, " + size + ", " + std::to_string(rank) + ">(p, " + made + ")") +
         entry("add", 256, "AddParams", "add_parts<Rule, " + size + ">(p, " + made + ")");
}

std::string two_shot_stub(RuleKind rule, int ranks, int rank, const char* rings) {
  return "#include \"cuda/two_shot.cuh\"\nusing Rule = " + rule_text(rule) + ";\n" +
         entry("two_shot", device::ring_lanes(ranks) * device::ring_roles(ranks) * 32, "TwoShotParams",
               std::string("two_shot<ark::device::") + rings + ", Rule, " + std::to_string(ranks) + ", " +
                   std::to_string(rank) + ">(p, " + made_of(rule) + ")");
}

std::string bulk_stub(RuleKind rule, int ranks, int rank) {
  return "#include \"cuda/bulk_two_shot.cuh\"\nusing Rule = " + rule_text(rule) + ";\n" +
         entry("bulk_two_shot", device::kBulkThreads, "TwoShotParams",
               "bulk_two_shot<Rule, " + std::to_string(ranks) + ", " + std::to_string(rank) + ">(p, " + made_of(rule) +
                   ")");
}

std::string bulk_move_stub(RuleKind, int, int) {
  return "#include \"cuda/bulk_move.cuh\"\n" +
         entry("bulk_move", device::kBulkMoveThreads, "MoveParams", "bulk_move<false>(p)") +
         entry("bulk_transfer", device::kBulkMoveThreads, "MoveParams", "bulk_move<true>(p)");
}

struct GroupRow {
  GroupKernel kernel;
  const char* listed;  // name in lists; null if another row's text has this entry
  const char* entry;
  std::string (*text)(RuleKind rule, int ranks, int rank);
  bool adds = true;  // instantiated for each rule and place
  int from_ranks = 1;
  int min_arch = 80;
};

constexpr GroupRow kGroup[] = {
    {GroupKernel::move, "move", "move", move_stub, false},
    {GroupKernel::rendezvous, nullptr, "rendezvous", move_stub, false},
    {GroupKernel::relay, "relay", "relay",
     [](RuleKind, int, int) {
       return "#include \"cuda/relay.cuh\"\n" + entry("relay", 480, "RelayParams", "relay(p)");
     },
     false},
    {GroupKernel::one_shot, "reduce", "one_shot", reduce_stub},
    {GroupKernel::add, nullptr, "add", reduce_stub},
    {GroupKernel::lines, "lines", "two_shot",
     [](RuleKind rule, int ranks, int rank) { return two_shot_stub(rule, ranks, rank, "Lines"); }},
    {GroupKernel::chunks, "chunks", "two_shot",
     [](RuleKind rule, int ranks, int rank) { return two_shot_stub(rule, ranks, rank, "Chunks"); }},
    {GroupKernel::bulk, "bulk", "bulk_two_shot", bulk_stub, true, 2, 90},
    {GroupKernel::bulk_move, "bulk_move", "bulk_move", bulk_move_stub, false, 2, 90},
    {GroupKernel::bulk_transfer, nullptr, "bulk_transfer", bulk_move_stub, false, 2, 90},
};
static_assert(std::size(kGroup) == kGroupKernels);

// Adds the stubs of one place, or (ranks 0) those that all places share.
void add_group(std::vector<Stub>& stubs, RuleKind rule, int ranks, int rank, const std::string& suffix) {
  for (const GroupRow& row : kGroup) {
    if (row.listed == nullptr || row.adds != (ranks != 0) || ranks < (row.adds ? row.from_ranks : 0)) continue;
    stubs.push_back({row.listed + suffix, row.text(rule, ranks, rank), row.min_arch});
  }
}

constexpr const char* kRuleNames[kRuleKinds] = {"bf16", "f16", "f32", "any"};

// float32 has no wider partials.
void add_between(std::vector<Stub>& stubs, std::initializer_list<RuleKind> rules) {
  using enum device::BetweenForm;
  stubs.push_back({"between_move", between_stub(move, RuleKind::any).text});
  for (const RuleKind rule : rules)
    for (const device::BetweenForm form : {add, add_wide}) {
      if (form == add_wide && rule == RuleKind::f32) continue;
      const BetweenStub stub = between_stub(form, rule);
      stubs.push_back({std::string(stub.entry) + "_" + kRuleNames[static_cast<int>(rule)], stub.text});
    }
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

GroupStub group_stub(GroupKernel kernel, RuleKind rule, int ranks, int rank) {
  const GroupRow& row =
      *std::find_if(std::begin(kGroup), std::end(kGroup), [&](const GroupRow& one) { return one.kernel == kernel; });
  return {row.text(rule, ranks, rank), row.entry};
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

BetweenStub between_stub(device::BetweenForm form, RuleKind rule) {
  const char* const names[] = {"between_move", "between_add", "between_add_wide"};
  const bool adds = form != device::BetweenForm::move;
  const std::string name = names[static_cast<int>(form)];
  return {"#include \"cuda/between.cuh\"\n" + (adds ? "using Rule = " + rule_text(rule) + ";\n" : "") +
              entry(name, device::kBetweenThreads, "BetweenParams",
                    name + (adds ? "<Rule>(p, " + made_of(rule) + ")" : "(p)")),
          names[static_cast<int>(form)]};
}

std::string peer_test_stub() {
  return "#include \"cuda/peer_test.cuh\"\n" +
         entry("peer_test", device::kPeerTestUnits, "PeerTestParams", "peer_test(p)");
}

std::vector<Stub> representative_stubs() {
  std::vector<Stub> stubs;
  stubs.push_back({"probe", jit::probe_stub()});
  stubs.push_back({"peer_test", peer_test_stub()});
  add_group(stubs, RuleKind::any, 0, 0, "");
  add_between(stubs, {RuleKind::bf16, RuleKind::any});
  const auto add = [&](RuleKind rule, int ranks, int rank) {
    const char* const name = kRuleNames[static_cast<int>(rule)];
    add_group(stubs, rule, ranks, rank, std::string("_") + name + "_" + std::to_string(ranks));
  };
  for (RuleKind rule : {RuleKind::bf16, RuleKind::f16, RuleKind::f32, RuleKind::any}) add(rule, 2, 0);
  add(RuleKind::bf16, 4, 1);
  add(RuleKind::bf16, 8, 7);
  stubs.push_back({"lines_any_1", group_stub(GroupKernel::lines, RuleKind::any, 1, 0).text});
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

std::vector<Stub> every_stub(const std::vector<int>& sizes) {
  std::vector<Stub> stubs;
  stubs.push_back({"probe", jit::probe_stub()});
  stubs.push_back({"peer_test", peer_test_stub()});
  add_group(stubs, RuleKind::any, 0, 0, "");
  add_between(stubs, {RuleKind::bf16, RuleKind::f16, RuleKind::f32, RuleKind::any});
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const bool wide : {false, true})
      for (uint32_t bits = 0; bits <= quantize::kMostBits + 1; ++bits) {
        const bool fp8 = bits > quantize::kMostBits;
        const CompressedKind kind{dtype, fp8 ? quantize::Format::fp8 : quantize::Format::uniform,
                                  fp8 ? quantize::kMostBits : bits, wide};
        const std::string suffix =
            std::string("_") + name_of(dtype) + (wide ? "_wide_" : "_") + (fp8 ? "fp8" : std::to_string(bits));
        for (const char* const name : {"compressed_encode", "compressed_encode_fed", "compressed_reduce",
                                       "compressed_reduce_fed", "compressed_sum"})
          stubs.push_back({name + suffix, compressed_stub(kind, name)});
      }
  for (Stub& stub : every_fused_stub()) stubs.push_back(std::move(stub));
  for (const int size : sizes)
    for (int kind = 0; kind < kRuleKinds; ++kind)
      for (int rank = 0; rank < size; ++rank)
        add_group(stubs, static_cast<RuleKind>(kind), size, rank,
                  std::string("_") + kRuleNames[kind] + "_" + std::to_string(size) + "_" + std::to_string(rank));
  return stubs;
}

}  // namespace ark
