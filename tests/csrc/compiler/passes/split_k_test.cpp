// Tests which products split_k cuts, and that the parts, added by their readers, are what the nodes compute.
#include "compiler/passes/split_k.hpp"
#include "compiler/passes/pipeline.hpp"

#include <gtest/gtest.h>

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

}  // namespace split_depth_test
}  // namespace ark::compiler
