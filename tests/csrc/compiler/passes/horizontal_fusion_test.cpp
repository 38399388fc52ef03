// Tests what fuse_horizontally and fuse_tails merge into one stage and what they do not, and that the result computes
// the same as the nodes.
#include "compiler/passes/horizontal_fusion.hpp"
#include "compiler/passes/pipeline.hpp"
#include "compiler/verify/validator.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "compiler/fuse/stage_case.hpp"
#include "compiler/passes/tail_fusion.hpp"
#include "compiler/schedule/plan.hpp"
#include "compiler/schedule/targets.hpp"
#include "util/error.hpp"

namespace ark::compiler {
namespace merge_products_test {

constexpr int kWorkers = 6;

// Weights have the layout [n, 12] of nn.Linear.
int linear(GraphBuilder& builder, int a, int64_t n, bool bias = false) {
  const int weights = builder.transpose(builder.parameter({n, 12}));
  return builder.matmul(a, weights, bias ? builder.parameter({n}) : -1);
}

std::vector<Stage> checked_stages(GraphBuilder& builder) {
  expect_same(
      builder.graph, [&](Memory& memory) { fill_inputs(memory, builder.graph); }, 3, kWorkers);
  EXPECT_NO_THROW(make_plan(builder.graph, gpu_target("sm_90a", kWorkers)));
  return stages_for(builder.graph, kWorkers);
}

// Returns the number of products of each stage.
std::vector<size_t> products_of(const std::vector<Stage>& stages) {
  std::vector<size_t> counts;
  for (const Stage& stage : stages) {
    if (const auto* several = std::get_if<ProductsStage>(&stage.body)) counts.push_back(several->products.size());
    if (std::holds_alternative<MatmulStage>(stage.body)) counts.push_back(1);
  }
  return counts;
}

TEST(MergedProducts, ShareRowsAndTheirWidthsHaveACommonPart) {
  struct Case {
    int64_t rows;
    std::vector<int64_t> widths;
    std::vector<size_t> products;
    int64_t extent;  // of the first
  };
  for (const Case& one :
       {Case{1, {24, 6, 6}, {3}, 6}, Case{3, {24, 12, 12}, {3}, 12}, Case{8, {18, 18}, {2}, 18},
        Case{16, {24, 6}, {2}, 6}, Case{17, {24, 6}, {1, 1}, 24}, Case{1, {24, 7, 12}, {2, 1}, 12},
        Case{2, {5, 5}, {2}, 5}, Case{2, {10, 5}, {1, 1}, 10}, Case{1, {12, 12, 12, 12, 12, 12}, {4, 2}, 12}}) {
    GraphBuilder builder;
    const int a = builder.input({one.rows, 12});
    for (size_t i = 0; i < one.widths.size(); ++i)
      builder.copy_out(builder.reduce("amax", linear(builder, a, one.widths[i], i % 2 == 0), {1}));
    const auto stages = checked_stages(builder);
    EXPECT_EQ(products_of(stages), one.products);
    EXPECT_EQ(stages[0].extent, one.extent);
    if (one.products[0] < 2) continue;
    EXPECT_EQ(stages[0].grain, 1);
    const auto merged = std::get<ProductsStage>(stages[0].body).products;
    const auto biases = std::count_if(merged.begin(), merged.end(), [](const auto& each) { return each.bias >= 0; });
    EXPECT_EQ(stages[0].accesses.size(), 1 + 2 * merged.size() + static_cast<size_t>(biases));
    EXPECT_TRUE(stages[0].tail.empty());
  }
}

TEST(MergedProducts, LeaveAtMostOneOfEightWorkersIdle) {
  for (const auto& [width, products] :
       {std::pair{28, std::vector<size_t>{2}}, {24, std::vector<size_t>{1, 1}}}) {  // parts: 7 and 6
    GraphBuilder builder;
    const int a = builder.input({1, 12});
    for (const int part : {1, 4}) builder.copy_out(builder.reduce("amax", linear(builder, a, width / part), {1}));
    EXPECT_EQ(products_of(stages_for(builder.graph, 8)), products);
    if (products.size() == 1)
      expect_same(
          builder.graph, [&](Memory& memory) { fill_inputs(memory, builder.graph); }, 3, 8);
  }
}

TEST(MergedProducts, OtherRowsLayoutsAndTypesStayApart) {
  GraphBuilder builder;
  const int a = builder.input({1, 12}), other = builder.input({1, 12});
  builder.copy_out(builder.reduce("amax", linear(builder, a, 12), {1}));
  builder.copy_out(builder.reduce("amax", linear(builder, other, 12), {1}));
  builder.copy_out(builder.reduce("amax", builder.matmul(a, builder.parameter({12, 12})), {1}));  // other layout
  const int halves = builder.transpose(builder.parameter({12, 12}, ScalarType::bf16));
  builder.copy_out(builder.reduce("amax", builder.matmul(a, halves), {1}));
  EXPECT_EQ(products_of(checked_stages(builder)), std::vector<size_t>(4, 1));
}

TEST(MergedProducts, DoNotOvertakeWhatTheyDependOn) {
  {  // the second's bias is computed from the first's result
    GraphBuilder builder;
    const int a = builder.input({1, 12});
    const int bias = builder.reduce("amax", linear(builder, a, 12), {1});
    builder.copy_out(builder.matmul(a, builder.transpose(builder.parameter({12, 12})), bias));
    EXPECT_EQ(products_of(checked_stages(builder)), std::vector<size_t>(2, 1));
  }
  {  // the rows change in between
    GraphBuilder builder;
    const int a = builder.input({1, 12}, ScalarType::f32, true);
    builder.copy_out(builder.reduce("amax", linear(builder, a, 12), {1}));
    builder.into(a, "add", {a, builder.literal(1)});
    builder.copy_out(builder.reduce("amax", linear(builder, a, 12), {1}));
    EXPECT_EQ(products_of(checked_stages(builder)), std::vector<size_t>(2, 1));
  }
}

int silu(GraphBuilder& builder, int x) {
  const int wide =
      builder.pointwise("add", {builder.pointwise("exp", {builder.pointwise("neg", {x})}), builder.literal(1)});
  return builder.pointwise("div", {x, wide});
}

TEST(JoinedPointwise, BothHalvesOfAGateAndItAreOneStage) {
  for (const int64_t rows : {1, 4, 8, 16}) {
    for (const bool seen : {false, true}) {
      const int64_t width = rows == 1 ? 40 : 520;  // pointwise stages would take short rows as one
      GraphBuilder builder;
      const int a = builder.input({rows, 12}), weights = builder.transpose(builder.parameter({width, 12}));
      const int gate = seen ? builder.into(builder.output({rows, width}), "matmul", {a, weights})
                            : builder.matmul(a, weights, builder.parameter({width}));
      const int both = builder.pointwise("mul", {silu(builder, gate), linear(builder, a, width)});
      builder.copy_out(builder.matmul(both, builder.parameter({width, 3})));
      const auto stages = checked_stages(builder);
      EXPECT_EQ(products_of(stages), (std::vector<size_t>{2, 1}));
      ASSERT_EQ(stages[0].tail.size(), 1u);
      EXPECT_EQ(stages[0].name, seen ? "matmul, matmul, swiglu" : "linear, matmul, swiglu");
      EXPECT_EQ(stages[0].tail[0].extent, stages[0].extent);
    }
  }
}

TEST(JoinedPointwise, OneProductIsEnoughInAnyLayoutAndTilesKeepItsGrain) {
  for (const bool across : {false, true}) {
    GraphBuilder builder;
    const int a = builder.input({5, 12});
    const int product = across ? builder.matmul(a, builder.parameter({12, 520})) : linear(builder, a, 520, true);
    builder.copy_out(silu(builder, product));
    const auto stages = checked_stages(builder);
    ASSERT_EQ(stages.size(), 1u);
    EXPECT_EQ(stages[0].tail.size(), 1u);
    EXPECT_EQ(stages[0].grain, across ? 32 : 8);
  }
}

TEST(JoinedPointwise, WhatItReadsBesideIsOlderThanTheRows) {
  for (const bool older : {false, true}) {
    GraphBuilder builder;
    const int given = builder.input({1, 12}), other = builder.input({1, 12});
    int rows = -1, beside = -1;
    const auto make_rows = [&] { rows = builder.pointwise("sub", {given, builder.reduce("amax", given, {1})}); };
    if (!older) make_rows();
    beside = linear(builder, other, 24);
    if (older) make_rows();
    builder.copy_out(builder.pointwise("mul", {linear(builder, rows, 24), beside}));
    size_t tails = 0;
    for (const Stage& stage : checked_stages(builder)) tails += stage.tail.size();
    EXPECT_EQ(tails, older ? 1u : 0u);
  }
}

TEST(JoinedPointwise, OtherElementsReductionsAndTheRowsThemselvesAreNotItsTilesOwn) {
  enum class Kind { flipped, halves, mean, in_place, many_rows };
  for (const Kind kind : {Kind::flipped, Kind::halves, Kind::mean, Kind::in_place, Kind::many_rows}) {
    GraphBuilder builder;
    const int a = builder.input({kind == Kind::many_rows ? 17 : 1, 12}, ScalarType::f32, kind == Kind::in_place);
    const int product = linear(builder, a, 12);
    if (kind == Kind::flipped) builder.copy_out(builder.view(product, {1, 12}, {12, -1}, 11));
    if (kind == Kind::halves)
      builder.copy_out(builder.pointwise("mul", {builder.slice(product, 1, 0, 6), builder.slice(product, 1, 6, 12)}));
    if (kind == Kind::mean) builder.copy_out(builder.pointwise("sub", {product, builder.reduce("mean", product, {1})}));
    if (kind == Kind::in_place) builder.into(a, "add", {a, product});
    if (kind == Kind::many_rows) builder.copy_out(silu(builder, product));
    for (const Stage& stage : checked_stages(builder)) EXPECT_TRUE(stage.tail.empty()) << static_cast<int>(kind);
  }
}

// Random products of the same and of other rows, and pointwise operators of one shape, some in place.
TEST(JoinedPointwise, RandomNetworksComputeTheSame) {
  size_t merged = 0, tails = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto pick = [&](int least, int most) { return least + static_cast<int>(random() % (most - least + 1)); };
    GraphBuilder builder;
    const int64_t rows = pick(1, 3) == 1 ? pick(2, 9) : 1, width = pick(1, 20);
    std::vector<int> inputs = {builder.input({rows, 12}), builder.input({rows, 12}, ScalarType::f32, true)}, made;
    for (int step = pick(3, 9); step > 0; --step) {
      const int kind = pick(0, 9);
      if (made.empty() || kind < 5) {
        const int a = inputs[pick(0, 3) == 0 ? 1 : 0];
        made.push_back(linear(builder, a, width * (pick(0, 3) == 0 ? 2 : 1), pick(0, 1) == 0));
      } else if (kind == 5) {
        builder.into(inputs[1], "add", {inputs[1], inputs[0]});
      } else {
        const int x = made[random() % made.size()], y = made[random() % made.size()];
        const bool same = builder.at(x).shape == builder.at(y).shape;
        made.push_back(kind < 8 && same ? builder.pointwise("mul", {x, y}) : builder.pointwise("tanh", {x}));
      }
      if (pick(0, 3) == 0) builder.copy_out(made.back());
    }
    builder.copy_out(builder.reduce("amax", made.back(), {1}));
    for (const Stage& stage : checked_stages(builder)) {
      merged += std::holds_alternative<ProductsStage>(stage.body) ? 1 : 0;
      tails += stage.tail.size();
    }
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(merged, 100u);
  EXPECT_GT(tails, 100u);
}

// Validates a gated network's plan after a change to one access.
std::string verdict_of(const std::function<void(Plan&, Stage&)>& change) {
  GraphBuilder builder;
  const int a = builder.input({2, 12});
  const int gate = linear(builder, a, 520), up = linear(builder, a, 520);
  const int both = builder.pointwise("mul", {silu(builder, gate), up});
  builder.copy_out(builder.matmul(both, builder.parameter({520, 3})));
  Plan plan = make_plan(builder.graph, gpu_target("sm_90a", kWorkers));
  EXPECT_GT(plan.tasks.size(), 3u);
  for (Stage& stage : plan.stages)
    if (!stage.tail.empty()) change(plan, stage);
  try {
    validate(plan);
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

TEST(JoinedPointwise, TheValidatorLooksAtWhatTailsTouch) {
  EXPECT_EQ(verdict_of([](Plan&, Stage&) {}), "");
  const auto read_of = [](Plan& plan, Stage& stage) -> Access& {
    for (Access& access : stage.tail[0].accesses)
      if (!access.write && plan.graph.buffer_of(access.value).kind == Buffer::Kind::temporary) return access;
    throw std::logic_error("the tail reads no product");
  };
  EXPECT_NE(verdict_of([&](Plan& plan, Stage& stage) { read_of(plan, stage).axis = -1; }).find("another tile"),
            std::string::npos);
  EXPECT_NE(verdict_of([&](Plan& plan, Stage& stage) { read_of(plan, stage).axis = 0; }).find("another tile"),
            std::string::npos);
  EXPECT_NE(verdict_of([](Plan&, Stage& stage) { stage.tail[0].extent /= 2; }).find("not its own"), std::string::npos);
  EXPECT_NE(verdict_of([](Plan&, Stage& stage) {
              std::erase_if(stage.accesses, [&](const Access& access) {
                return access.write && access.value == stage.tail[0].accesses.back().value;
              });
            }),
            "");
}

}  // namespace merge_products_test
}  // namespace ark::compiler
