// Tests which products split_k cuts, and that the parts, added by their readers, are what the nodes compute.
#include "compiler/passes/split_k.hpp"
#include "compiler/passes/pipeline.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

#include "compiler/fuse/stage_case.hpp"
#include "compiler/schedule/plan.hpp"
#include "compiler/schedule/targets.hpp"

namespace ark::compiler {
namespace split_depth_test {

constexpr int kWorkers = 12;
constexpr ScalarType kHalf = ScalarType::f16;

struct Deep {
  GraphBuilder builder;
  int product = -1;

  // The result's rows have 40 columns.
  Deep(int64_t rows, int64_t depth, bool bias) {
    const int a = builder.input({rows, depth}, kHalf);
    const int weights = builder.transpose(builder.parameter({40, depth}, kHalf));
    product = builder.matmul(a, weights, bias ? builder.parameter({40}, kHalf) : -1, kHalf);
  }
  int residual() { return builder.input(builder.at(product).shape, kHalf); }
};

// Small integers, whose sums are exact.
void fill(Memory& memory, const Graph& graph) {
  std::mt19937 random(5);
  for (size_t b = 0; b < graph.buffers().size(); ++b) {
    if (graph.buffers()[b].kind != Buffer::Kind::input) continue;
    for (size_t byte = 0; byte < memory.cells[b].size(); ++byte) {
      memory.cells[b][byte] = static_cast<double>(random() % 3) - 1;
      memory.written[b][byte] = 1;
    }
  }
}

// Returns how many products the stages have, after checking their results and the plan.
size_t products_in(Deep& deep) {
  Graph& graph = deep.builder.graph;
  expect_same(
      graph, [&](Memory& memory) { fill(memory, graph); }, 3, kWorkers);
  EXPECT_NO_THROW(make_plan(graph, gpu_target("sm_90a", kWorkers)));
  size_t count = 0;
  for (const Stage& stage : stages_for(graph, kWorkers))
    count += std::holds_alternative<MatmulStage>(stage.body) ? 1 : 0;
  return count;
}

TEST(SplitDepth, ANormAddsTheParts) {
  for (const bool bias : {false, true}) {
    for (const int64_t depth : {2048, 2056}) {
      Deep deep(30, depth, bias);
      const int sum = deep.builder.pointwise("add", {deep.product, deep.residual()}, kHalf);
      const int mean = deep.builder.reduce("mean", sum, {1}, true, kHalf);
      deep.builder.copy_out(deep.builder.pointwise("sub", {sum, mean}, kHalf));
      EXPECT_GT(products_in(deep), 1u);
    }
  }
}

TEST(SplitDepth, SoDoesWhoReadsItTransposed) {
  Deep deep(40, 2048, true);
  deep.builder.copy_out(deep.builder.pointwise("add", {deep.builder.transpose(deep.product), deep.residual()}, kHalf));
  EXPECT_GT(products_in(deep), 1u);
}

TEST(SplitDepth, WhatIsShallowSeenOrReadTwiceStaysWhole) {
  Deep shallow(30, 128, true);
  shallow.builder.copy_out(shallow.builder.pointwise("add", {shallow.product, shallow.residual()}, kHalf));
  EXPECT_EQ(products_in(shallow), 1u);

  Deep seen(30, 2048, true);
  seen.builder.copy_out(seen.product);
  EXPECT_EQ(products_in(seen), 1u);

  Deep twice(30, 2048, false);
  const int other = twice.builder.matmul(twice.product, twice.builder.parameter({40, 24}, kHalf), -1, kHalf);
  twice.builder.copy_out(other);
  twice.builder.copy_out(twice.builder.pointwise("add", {twice.product, twice.residual()}, kHalf));
  EXPECT_EQ(products_in(twice), 2u);
}

// Decoding of 20 sequences: the queries, keys and values that attention makes itself are sums of parts (kv_append.hpp).
TEST(SplitDepth, SoDoProgramsInsideAttention) {
  constexpr int64_t kBatch = 20, kColumns = 8, kPositions = 40, kDepth = 2048;
  constexpr int kEnough = 2 * kBatch;  // a worker for each key head
  GraphBuilder builder;
  const int rows = builder.input({kBatch, kDepth}, kHalf), index = builder.input({1}, ScalarType::i64);
  const auto heads = [&](int64_t count) {
    const int weights = builder.transpose(builder.parameter({count * kColumns, kDepth}, kHalf));
    return builder.reshape(builder.matmul(rows, weights, -1, kHalf), {kBatch, count, 1, kColumns});
  };
  const auto scaled = [&](int x) { return builder.pointwise("mul", {x, builder.input({kColumns}, kHalf)}, kHalf); };
  const int keys = builder.input({kBatch, 2, kPositions, kColumns}, kHalf, true);
  const int values = builder.input({kBatch, 2, kPositions, kColumns}, kHalf, true);
  const int q = scaled(heads(6));
  builder.into(keys, "scatter", {keys, index, scaled(heads(2))}, {{"dim", int64_t{2}}});
  builder.into(values, "scatter", {values, index, heads(2)}, {{"dim", int64_t{2}}});
  builder.into(builder.output({kBatch, 6, 1, kColumns}, kHalf), "attention", {q, keys, values}, {{"scale", 0.5}});
  expect_same(
      builder.graph,
      [&](Memory& memory) {
        fill(memory, builder.graph);
        std::vector<double>& cells = memory.cells[static_cast<size_t>(builder.at(index).buffer)];
        std::fill(cells.begin(), cells.end(), 11);
      },
      3, kEnough);
  EXPECT_NO_THROW(make_plan(builder.graph, gpu_target("sm_90a", kEnough)));
  const std::vector<Stage> stages = stages_for(builder.graph, kEnough);
  ASSERT_FALSE(stages.empty());
  const Stage& last = stages.back();
  ASSERT_EQ(last.tail.size(), 3u);
  std::vector<const Stage*> programs{&last, &last.tail[0], &last.tail[1]};
  for (const Stage* const one : programs) {
    const auto& code = std::get<RowProgram>(one->body).code;
    EXPECT_TRUE(std::any_of(code.begin(), code.end(), [](const auto& load) { return load.parts.count > 1; }));
  }
}

}  // namespace split_depth_test
}  // namespace ark::compiler
