// Tests into which parts split_queries and split_kv cut attention, and that they compute what the node does.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "compiler/fuse/stage_case.hpp"
#include "compiler/schedule/plan.hpp"
#include "compiler/schedule/targets.hpp"

namespace ark::compiler {
namespace split_attention_test {

constexpr int kWorkers = 132;
constexpr ScalarType kHalf = ScalarType::f16;

struct Case {
  int64_t batch, heads, kv_heads, rows, positions, mask_rows = 1;
};

struct Cut {
  size_t parts = 0, tasks = 0, combines = 0;
};

// Checks results and plan, and returns what became of the attention.
Cut checked(GraphBuilder& builder) {
  Graph& graph = builder.graph;
  const auto fill = [&](Memory& memory) { fill_inputs(memory, graph); };
  expect_same(graph, fill, 3, kWorkers);
  EXPECT_NO_THROW(make_plan(graph, gpu_target("sm_90a", kWorkers)));
  Cut cut;
  for (const Stage& stage : stages_for(graph, kWorkers)) {
    const bool part = std::holds_alternative<AttentionStage>(stage.body);
    cut.parts += part ? 1 : 0;
    cut.tasks += part ? static_cast<size_t>(stage.extent) : 0;
    cut.combines += std::holds_alternative<CombineStage>(stage.body) ? 1 : 0;
  }
  return cut;
}

// Every sequence has a mask of its own.
Cut cut_of(const Case& one) {
  constexpr int64_t kColumns = 8;
  GraphBuilder builder;
  const int q = builder.input({one.batch, one.heads, one.rows, kColumns}, kHalf);
  const int k = builder.input({one.batch, one.kv_heads, one.positions, kColumns}, kHalf);
  const int v = builder.input({one.batch, one.kv_heads, one.positions, kColumns}, kHalf);
  const int mask = builder.input({one.batch, 1, one.mask_rows, one.positions}, kHalf);
  builder.into(builder.output(builder.at(q).shape, kHalf), "attention", {q, k, v, mask}, {{"scale", 0.5}});
  return checked(builder);
}

TEST(SplitAttention, ShortSequencesHaveATaskForEachHead) {
  for (const int64_t mask_rows : {1, 16}) {
    const Cut cut = cut_of({8, 16, 16, 16, 16, mask_rows});
    EXPECT_EQ(cut.tasks, 8u * 16u);
    EXPECT_EQ(cut.combines, 0u);
  }
}

TEST(SplitAttention, MoreSequencesThanHeadsAreCutByHeads) {
  const Cut cut = cut_of({24, 4, 2, 3, 9});
  EXPECT_EQ(cut.parts, 2u);
  EXPECT_EQ(cut.tasks, 24u * 2u);
}

// Heads first: only what they leave idle takes blocks of positions.
TEST(SplitAttention, DecodingOfPaddedSequences) {
  const Cut few = cut_of({2, 8, 4, 1, 2048});
  EXPECT_EQ(few.combines, 1u);
  EXPECT_EQ(few.tasks, 2u * 4u * 8u);  // blocks of 256 positions
  const Cut many = cut_of({20, 16, 8, 1, 520});
  EXPECT_EQ(many.combines, 0u);
  EXPECT_EQ(many.tasks, 20u * 8u);
}

// A row whose mask leaves no position out of several blocks is zero, or NaN as by a softmax.
TEST(SplitAttention, RowsWithoutPositions) {
  for (const bool nan_rows : {false, true}) {
    GraphBuilder builder;
    const int q = builder.input({2, 4, 1, 8}, kHalf), k = builder.input({2, 4, 600, 8}, kHalf);
    const int none = builder.literal(-std::numeric_limits<double>::infinity(), kHalf);
    const int first = builder.input({2, 1, 1, 1}, kHalf);
    const int one = builder.pointwise("eq", {first, builder.literal(1, kHalf)});
    const int mask = builder.pointwise("where", {one, none, builder.input({600}, kHalf)}, kHalf);
    const int out = builder.into(builder.output(builder.at(q).shape, kHalf), "attention", {q, k, k, mask},
                                 {{"scale", 0.5}, {"nan_rows", nan_rows}});
    const auto fill = [&](Memory& memory) {
      fill_inputs(memory, builder.graph);
      const size_t buffer = static_cast<size_t>(builder.at(first).buffer);
      memory.cells[buffer][0] = 1;
    };
    Memory memory(builder.graph);
    fill(memory);
    run_nodes(memory, builder.graph);
    const auto& cells = memory.cells[static_cast<size_t>(builder.at(out).buffer)];
    EXPECT_TRUE(nan_rows ? std::isnan(cells[0]) : cells[0] == 0);
    EXPECT_FALSE(std::isnan(cells[cells.size() / 2]));
    expect_same(builder.graph, fill, 3, kWorkers);
  }
}

// A part reads all keys, also where these are its queries' value.
TEST(SplitAttention, OfAValueWithItself) {
  for (const bool causal : {false, true}) {
    GraphBuilder builder;
    const int x = builder.input({1, 2, 150, 8}, kHalf);
    const int made = builder.pointwise("mul", {x, builder.input({8}, kHalf)}, kHalf);
    builder.into(builder.output(builder.at(x).shape, kHalf), "attention", {made, made, made},
                 {{"scale", 0.5}, {"causal", causal}});
    EXPECT_GT(checked(builder).parts, 1u);
  }
}

}  // namespace split_attention_test
}  // namespace ark::compiler
