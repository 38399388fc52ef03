// Tests which products fuse_dual_products joins with the program behind them and which it leaves, and that the result
// computes the same as the nodes.
#include "compiler/passes/dual_product_fusion.hpp"
#include "compiler/passes/pipeline.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "compiler/fuse/stage_case.hpp"
#include "compiler/schedule/plan.hpp"
#include "compiler/schedule/targets.hpp"

namespace ark::compiler {
namespace dual_products_test {

constexpr int kWorkers = 6;
constexpr ScalarType kHalf = ScalarType::f16, kSingle = ScalarType::f32;

int linear(GraphBuilder& builder, int a, int64_t n, int bias = -1, ScalarType type = kSingle) {
  const int64_t depth = builder.at(a).shape.back();
  return builder.matmul(a, builder.transpose(builder.parameter({n, depth}, type)), bias, type);
}

int silu(GraphBuilder& builder, int x) {
  const ScalarType type = builder.at(x).type;
  const int wide = builder.pointwise(
      "add", {builder.pointwise("exp", {builder.pointwise("neg", {x}, type)}, type), builder.literal(1, type)}, type);
  return builder.pointwise("div", {x, wide}, type);
}

int gated(GraphBuilder& builder, int gate, int up) {
  return builder.pointwise("mul", {silu(builder, gate), up}, builder.at(gate).type);
}

std::vector<Stage> checked_stages(GraphBuilder& builder, int workers = kWorkers) {
  expect_same(
      builder.graph, [&](Memory& memory) { fill_inputs(memory, builder.graph); }, 3, workers);
  EXPECT_NO_THROW(make_plan(builder.graph, gpu_target("sm_90a", workers)));
  return stages_for(builder.graph, workers);
}

size_t duals_in(const std::vector<Stage>& stages) {
  return static_cast<size_t>(std::count_if(stages.begin(), stages.end(), [](const Stage& stage) {
    const auto* const product = std::get_if<MatmulStage>(&stage.body);
    return product != nullptr && product->second.b >= 0;
  }));
}

TEST(DualProducts, BothHalvesOfAGateAndItAreOneStageForEachBlockOfRows) {
  for (const ScalarType type : {kSingle, kHalf}) {
    for (const int64_t rows : {17, 72, 140}) {
      for (const bool bias : {false, true}) {
        for (const bool up_first : {false, true}) {
          for (const bool across : {false, true}) {
            GraphBuilder builder;
            const int a = builder.input({rows, 12}, type);
            const auto product = [&] {
              const int added = bias ? builder.parameter({70}, type) : -1;
              return across ? builder.matmul(a, builder.parameter({12, 70}, type), added, type)
                            : linear(builder, a, 70, added, type);
            };
            const int one = product(), other = product();
            builder.copy_out(up_first ? gated(builder, other, one) : gated(builder, one, other));
            const auto stages = checked_stages(builder);
            EXPECT_EQ(duals_in(stages), stages.size());
            const auto& made = std::get<MatmulStage>(stages[0].body);
            EXPECT_EQ(stages[0].name, bias ? "linear, linear+swiglu" : "matmul, matmul+swiglu");
            EXPECT_EQ(stages[0].grain, made.tile_columns);
            EXPECT_EQ(stages[0].accesses.size(), bias ? 6u : 4u);
            EXPECT_EQ(made.second.bias >= 0, bias);
          }
        }
      }
    }
  }
}

TEST(DualProducts, LeadingDimensionsAndOneBiasForEachElementAreFine) {
  GraphBuilder builder;
  const int a = builder.input({2, 20, 12});
  const auto product = [&] { return linear(builder, a, 33, builder.input({2, 20, 33})); };
  const int one = product(), other = product();
  builder.copy_out(gated(builder, one, other));
  EXPECT_EQ(duals_in(checked_stages(builder)), 1u);
}

// The network of one gate with a change.
enum class Change {
  none,
  few_rows,
  other_rows,
  one_bias,
  other_bias,
  other_layout,
  other_width,
  first_seen,
  second_seen,
  read_twice,
  third_operand,
  broadcast_operand,
  turned,
  reduced,
  batch,
  into_rows,
  rows_change,
  bias_of_first,
};

GraphBuilder changed(Change change) {
  const auto is = [&](Change one) { return change == one; };
  GraphBuilder builder;
  const int64_t rows = is(Change::few_rows) ? 16 : 24, n = 24;
  const bool mutated = is(Change::rows_change) || is(Change::into_rows);
  const Shape shape = is(Change::batch) ? Shape{2, rows, n} : Shape{rows, n};
  const int a = builder.input(shape, kSingle, mutated), other = builder.input(shape);
  const auto matrix = [&](int64_t width) {
    return is(Change::batch) ? builder.input({2, n, width}) : builder.transpose(builder.parameter({width, n}));
  };
  const auto seen = [&](bool seen, const std::vector<int>& inputs) {
    return seen ? builder.into(builder.output(shape), "matmul", inputs)
                : builder.matmul(inputs[0], inputs[1], inputs.size() > 2 ? inputs[2] : -1);
  };
  std::vector<int> of_one{a, matrix(n)}, of_other{is(Change::other_rows) ? other : a, matrix(n)};
  if (is(Change::one_bias)) of_one.push_back(builder.parameter({n}));
  if (is(Change::other_bias)) {
    of_one.push_back(builder.parameter({n}));
    of_other.push_back(builder.parameter({rows, n}));
  }
  if (is(Change::other_layout)) of_other[1] = builder.parameter({n, n});
  if (is(Change::other_width)) of_other[1] = builder.transpose(builder.parameter({1, n}));
  const int one = seen(is(Change::first_seen), of_one);
  if (is(Change::rows_change)) builder.into(a, "add", {a, builder.literal(1)});
  if (is(Change::bias_of_first)) {
    of_one.push_back(builder.parameter({n}));
    of_other.push_back(builder.reshape(builder.reduce("amax", one, {0}), {n}));
  }
  const int two = seen(is(Change::second_seen), of_other);
  if (is(Change::read_twice)) builder.copy_out(builder.reduce("amax", two, {1}));
  int both = gated(builder, one, is(Change::turned) ? builder.transpose(two) : two);
  if (is(Change::third_operand)) both = builder.pointwise("add", {both, other});
  if (is(Change::broadcast_operand)) both = builder.pointwise("mul", {both, builder.parameter({n})});
  if (is(Change::reduced)) both = builder.pointwise("sub", {both, builder.reduce("mean", both, {1})});
  if (is(Change::into_rows))
    builder.into(a, "copy", {both});
  else
    builder.copy_out(both);
  return builder;
}

TEST(DualProducts, WhatDiffersOrIsReadElsewhereStaysApart) {
  for (int change = 0; change <= static_cast<int>(Change::bias_of_first); ++change) {
    SCOPED_TRACE("change " + std::to_string(change));
    GraphBuilder builder = changed(static_cast<Change>(change));
    EXPECT_EQ(duals_in(checked_stages(builder)) > 0, static_cast<Change>(change) == Change::none);
  }
}

TEST(DualProducts, OtherStagesMayStandBetween) {
  GraphBuilder builder;
  const int a = builder.input({24, 24}), other = builder.input({24, 24});
  const int one = linear(builder, a, 24);
  const int between = linear(builder, other, 24);
  const int two = linear(builder, a, 24, builder.reshape(builder.reduce("amax", between, {0}), {24}));
  const int first = builder.matmul(other, builder.parameter({24, 24}));  // between the products and the program
  builder.copy_out(first);
  builder.copy_out(builder.pointwise("mul", {one, builder.pointwise("relu", {two})}));
  EXPECT_EQ(duals_in(checked_stages(builder)), 0u) << "only one has a bias";

  GraphBuilder plain;
  const int x = plain.input({24, 24}), y = plain.input({24, 24});
  const int gate = linear(plain, x, 24);
  plain.copy_out(plain.reduce("amax", linear(plain, y, 24), {1}));
  const int up = linear(plain, x, 24);
  plain.copy_out(plain.matmul(y, plain.parameter({24, 24})));
  plain.copy_out(gated(plain, gate, up));
  EXPECT_EQ(duals_in(checked_stages(plain)), 1u);
}

TEST(DualProducts, TheCpuHasNone) {
  GraphBuilder builder = changed(Change::none);
  EXPECT_EQ(duals_in(checked_stages(builder, 1)), 0u);
}

// The stages of a gate on a GPU, without running them: (rows, width, depth).
std::vector<Stage> planned(int64_t rows, int64_t width, int64_t depth, ScalarType type, const std::string& arch) {
  GraphBuilder builder;
  const int a = builder.input({rows, depth}, type);
  const int one = linear(builder, a, width, -1, type), other = linear(builder, a, width, -1, type);
  builder.copy_out(gated(builder, one, other));
  return make_plan(builder.graph, gpu_target(arch, 132)).stages;
}

TEST(DualProducts, TheirTilesTakeAsManyColumnsOfBothMatrices) {
  const auto tile = [](const std::vector<Stage>& stages) {
    const auto& product = std::get<MatmulStage>(stages.at(0).body);
    return std::pair(product.tile_rows, product.tile_columns);
  };
  EXPECT_EQ(tile(planned(2048, 8192, 2048, kHalf, "sm_90a")), std::pair(int64_t{256}, int64_t{64}));
  EXPECT_EQ(tile(planned(2048, 8192, 2048, kHalf, "sm_80")), std::pair(int64_t{128}, int64_t{64}));
  EXPECT_LE(tile(planned(2048, 8192, 2048, kSingle, "sm_90a")).second, 64);
  for (const int64_t rows : {64, 200, 384, 1000, 2048})
    for (const int64_t width : {1000, 2048, 4096, 14336}) {
      const auto stages = planned(rows, width, 2048, kHalf, "sm_90a");
      ASSERT_EQ(duals_in(stages), stages.size()) << rows << " x " << width;
      EXPECT_TRUE(tile(stages).second == 32 || tile(stages).second == 64 || tile(stages).second == 128);
    }
}

TEST(DualProducts, WhereWorkersWouldIdleTwoProductsAreFaster) {
  EXPECT_EQ(duals_in(planned(64, 512, 8192, kHalf, "sm_90a")), 0u);
  EXPECT_EQ(duals_in(planned(64, 512, 8192, kSingle, "sm_90a")), 0u);
}

// Random products of shared rows, gates of the last two, and other readers; some change the rows.
TEST(DualProducts, RandomNetworksComputeTheSame) {
  size_t duals = 0, others = 0;
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto pick = [&](int least, int most) { return least + static_cast<int>(random() % (most - least + 1)); };
    GraphBuilder builder;
    const int64_t rows = pick(17, 30), width = pick(2, 10);
    const std::vector<int> inputs = {builder.input({rows, 8}), builder.input({rows, 8}, kSingle, true)};
    std::vector<int> made;
    for (int step = pick(4, 12); step > 0; --step) {
      const int kind = pick(0, 9);
      if (made.size() < 2 || kind < 5) {
        const int bias = pick(0, 5) == 0 ? builder.parameter({width}) : -1;
        made.push_back(linear(builder, inputs[pick(0, 3) == 0 ? 1 : 0], width, bias));
      } else if (kind == 5) {
        builder.into(inputs[1], "add", {inputs[1], inputs[0]});
      } else if (kind == 6) {
        builder.copy_out(made[random() % made.size()]);
      } else {
        builder.copy_out(gated(builder, made[made.size() - 1], made[made.size() - 2]));
        if (pick(0, 3) != 0) made.resize(made.size() - 2);  // else others may read them again
      }
    }
    builder.copy_out(builder.reduce("amax", inputs[1], {1}));
    const auto stages = checked_stages(builder);
    duals += duals_in(stages);
    others += stages.size() - duals_in(stages);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(duals, 30u);
  EXPECT_GT(others, 100u);
}

}  // namespace dual_products_test
}  // namespace ark::compiler
