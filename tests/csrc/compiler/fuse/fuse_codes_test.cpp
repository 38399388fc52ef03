// Tests stages of products with quantised weights: what they access, which ones merge on a GPU, and that they compute
// the same as the nodes.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "compiler/fuse/stage_case.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {
namespace fuse_codes_test {

constexpr int kWorkers = 6;

struct Form {
  int64_t bits = 8;
  int64_t groups = 1;
  std::string zero;
  bool scaled = true, biased = false, is_signed = false, high_first = false;
  int64_t offset = 0;
};

// Weights have the layout [n, k] of nn.Linear.
int linear(GraphBuilder& builder, int a, int64_t n, const Form& form) {
  const int64_t k = builder.at(a).shape[1];
  const ScalarType type = form.bits == 4 ? ScalarType::u8 : ScalarType::i8;
  std::vector<int> inputs = {a, builder.transpose(builder.parameter({n, k * form.bits / 8}, type))};
  if (form.scaled) inputs.push_back(builder.transpose(builder.parameter({n, form.groups})));
  if (!form.zero.empty()) inputs.push_back(builder.transpose(builder.parameter({n, form.groups})));
  if (form.biased) inputs.push_back(builder.parameter({n}));
  return builder.into(builder.temporary({builder.at(a).shape[0], n}), "dequant_matmul", inputs,
                      {{"bits", form.bits},
                       {"signed", form.is_signed},
                       {"high_first", form.high_first},
                       {"offset", form.offset},
                       {"scaled", form.scaled},
                       {"zero", form.zero},
                       {"biased", form.biased}});
}

// Codes are integers.
void fill(Memory& memory, const Graph& graph) {
  fill_inputs(memory, graph);
  std::mt19937 random(3);
  for (const Value& value : graph.values()) {
    if (value.is_literal() || !is_code(value.type)) continue;
    for (double& cell : memory.cells[static_cast<size_t>(value.buffer)])
      cell = static_cast<double>(random() % 256) - (value.type == ScalarType::i8 ? 128 : 0);
  }
}

void check(GraphBuilder& builder) {
  for (const int workers : {1, kWorkers})
    expect_same(
        builder.graph, [&](Memory& memory) { fill(memory, builder.graph); }, 3, workers);
  EXPECT_NO_THROW(make_plan(builder.graph, gpu_target("sm_90a", kWorkers)));
  EXPECT_NO_THROW(make_plan(builder.graph, target_named("cpu")));
}

const Form kForms[] = {
    {},
    {.scaled = false},
    {.zero = "before", .biased = true},
    {.groups = 3, .zero = "after"},
    {.scaled = false, .offset = -3},
    {.bits = 4, .groups = 3, .zero = "before"},
    {.bits = 4, .groups = 1, .biased = true, .offset = 8},
    {.bits = 4, .groups = 3, .zero = "after", .high_first = true, .offset = 8},
    {.bits = 4, .groups = 3, .is_signed = true},
};

TEST(CodedProducts, ComputeWhatTheirNodesDo) {
  for (const int64_t rows : {1, 5, 40}) {
    GraphBuilder builder;
    const int a = builder.input({rows, 96});
    for (const Form& form : kForms) builder.copy_out(linear(builder, a, 10, form));
    check(builder);
  }
}

// Only on a CPU.
TEST(CodedProducts, OfBlocksOfColumnsAreCutBetweenThem) {
  for (const int64_t rows : {1, 3, 200}) {
    GraphBuilder builder;
    const int a = builder.input({rows, 64}), codes = builder.parameter({3, 64, 16}, ScalarType::u8);
    const int scales = builder.parameter({2, 96, 2});
    const int scale = builder.view(scales, {2, 96}, {192, 2}), zero = builder.view(scales, {2, 96}, {192, 2}, 1);
    builder.copy_out(builder.into(builder.temporary({rows, 96}), "dequant_matmul", {a, codes, scale, zero},
                                  {{"bits", int64_t{4}},
                                   {"signed", false},
                                   {"high_first", false},
                                   {"offset", int64_t{8}},
                                   {"scaled", true},
                                   {"zero", std::string("after")},
                                   {"biased", false},
                                   {"block", int64_t{32}}}));
    expect_same(
        builder.graph, [&](Memory& memory) { fill(memory, builder.graph); }, 3, 1);
    const auto stages = stages_for(builder.graph, 1);
    EXPECT_EQ(stages.at(0).extent, rows == 200 ? 200 : 96);
    EXPECT_EQ(stages[0].accesses.at(1).axis, rows == 200 ? -1 : 0);
    if (rows < 200) EXPECT_EQ(stages[0].grain % 32, 0);
    EXPECT_NO_THROW(make_plan(builder.graph, target_named("cpu")));
  }
}

TEST(CodedProducts, TouchTheirTilesCodesAndScales) {
  GraphBuilder builder;
  builder.copy_out(linear(builder, builder.input({2, 96}), 48, {.bits = 4, .groups = 3, .zero = "before"}));
  const auto stages = stages_for(builder.graph, 1);
  const auto& product = std::get<MatmulStage>(stages.at(0).body);
  EXPECT_EQ(stages[0].name, "int4 linear");
  EXPECT_EQ(stages[0].extent, 48);
  EXPECT_EQ(product.codes.group, 32);
  EXPECT_EQ(stages[0].bytes, 2 * 96 * 4 + 48 * 48 + 2 * 48 * 3 * 4 + 2 * 48 * 4);
  std::vector<int> cut;
  for (const Access& access : stages[0].accesses) cut.push_back(access.axis);
  EXPECT_EQ(cut, (std::vector<int>{-1, 1, 1, 1, 1}));  // rows; then codes, scales, zeros and the result
}

TEST(CodedProducts, ShareRowsWhereTheyAreCodedAlike) {
  GraphBuilder builder;
  const int a = builder.input({1, 96});
  const Form four{.bits = 4, .groups = 3, .zero = "before"};
  Form other = four;
  other.high_first = true;
  std::vector<int> made;
  for (const auto& [n, form] : {std::pair{24, four}, {12, four}, {12, other}, {12, Form{}}, {24, Form{}}})
    made.push_back(linear(builder, a, n, form));
  made.push_back(builder.matmul(a, builder.transpose(builder.parameter({24, 96}))));
  for (const int one : made) builder.copy_out(builder.reduce("amax", one, {1}));
  check(builder);
  std::vector<size_t> products;
  for (const Stage& stage : stages_for(builder.graph, kWorkers))
    if (!matmuls_of(stage).empty()) products.push_back(matmuls_of(stage).size());
  EXPECT_EQ(products, (std::vector<size_t>{2, 1, 2, 1}));
}

}  // namespace fuse_codes_test
}  // namespace ark::compiler
