// Tests which results fp32_intermediates keeps in float32, and that stages still compute the same as the nodes.
#include "compiler/passes/fp32_intermediates.hpp"
#include "compiler/passes/pipeline.hpp"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <string>

#include "compiler/fuse/stage_case.hpp"
#include "compiler/schedule/plan.hpp"
#include "compiler/schedule/targets.hpp"

namespace ark::compiler {
namespace keep_float_test {

constexpr int kWorkers = 12;
constexpr ScalarType kHalf = ScalarType::bf16;

int linear(GraphBuilder& builder, int a, int64_t n) {
  const int64_t k = builder.at(a).shape.back();
  return builder.matmul(a, builder.transpose(builder.parameter({n, k}, kHalf)), -1, kHalf);
}

// Returns, stage by stage, the types of the temporaries that it writes.
std::vector<ScalarType> written(GraphBuilder& builder) {
  Graph& graph = builder.graph;
  expect_same(
      graph, [&](Memory& memory) { fill_inputs(memory, graph); }, 3, kWorkers);
  EXPECT_NO_THROW(make_plan(graph, gpu_target("sm_90a", kWorkers)));
  const std::vector<Stage> stages = fp32_intermediates(graph, make_stages(graph), gpu_target("sm_90a", kWorkers));
  std::vector<ScalarType> types;
  for (const Stage& stage : stages)
    for (const Access& access : stage.accesses)
      if (access.write && graph.buffer_of(access.value).kind == Buffer::Kind::temporary)
        types.push_back(graph.values()[static_cast<size_t>(access.value)].type);
  return types;
}

using Types = std::vector<ScalarType>;
constexpr ScalarType kWide = ScalarType::f32;

// x + w1(x), read by a norm and by the next residual, is not rounded. What the norm passes to a product is.
TEST(KeepFloat, AResidualAndWhatIsAddedToIt) {
  GraphBuilder builder;
  const int x = builder.input({1, 24}, kHalf);
  const int sum = builder.pointwise("add", {x, linear(builder, x, 24)}, kHalf);
  const int mean = builder.reduce("mean", sum, {1}, true, kHalf);
  const int normed = builder.pointwise("sub", {sum, mean}, kHalf);
  builder.copy_out(builder.pointwise("add", {sum, linear(builder, normed, 24)}, kHalf));
  EXPECT_EQ(written(builder), (Types{kWide, kWide, kHalf, kWide}));
}

TEST(KeepFloat, WhatAProductReadsIsRounded) {
  GraphBuilder builder;
  const int x = builder.input({2, 24}, kHalf);
  const int first = linear(builder, x, 24);  // read by a product and by a row program
  const int second = linear(builder, first, 24);
  builder.copy_out(builder.pointwise("mul", {first, second}, kHalf));
  EXPECT_EQ(written(builder), (Types{kHalf, kWide}));
}

TEST(KeepFloat, WhatAProductReadsIsRoundedForOthersToo) {
  GraphBuilder builder;
  const int x = builder.input({1, 24}, kHalf);
  const int sum = builder.pointwise("add", {x, linear(builder, x, 24)}, kHalf);
  builder.copy_out(sum);
  builder.copy_out(linear(builder, sum, 12));
  builder.copy_out(builder.reduce("amax", sum, {1}, false, kHalf));
  EXPECT_EQ(written(builder), (Types{kWide, kHalf, kWide}));
}

// A residual that the caller sees is rounded for its other readers, too.
TEST(KeepFloat, WhatIsSeenIsRoundedForOthersToo) {
  GraphBuilder builder;
  const int x = builder.input({1, 24}, kHalf);
  const int sum = builder.pointwise("add", {x, linear(builder, x, 24)}, kHalf);
  builder.copy_out(sum);
  const int mean = builder.reduce("mean", sum, {1}, true, kHalf);
  const int normed = builder.pointwise("sub", {sum, mean}, kHalf);
  builder.copy_out(builder.pointwise("add", {sum, linear(builder, normed, 24)}, kHalf));
  Graph& graph = builder.graph;
  int both = 0;
  for (const Stage& stage : fp32_intermediates(graph, make_stages(graph), gpu_target("sm_90a", kWorkers))) {
    const auto* program = std::get_if<RowProgram>(&stage.body);
    if (program == nullptr) continue;
    std::map<int, std::set<ScalarType>> stored;  // by register
    for (const auto& one : program->code)
      if (one.kind == RowProgram::Instruction::Kind::store)
        stored[one.args[0]].insert(graph.values()[static_cast<size_t>(one.value)].type);
    for (const auto& [from, types] : stored) {
      if (types.size() < 2) continue;
      ++both;
      EXPECT_EQ(program->code[static_cast<size_t>(from)].type, kHalf);
    }
  }
  EXPECT_GT(both, 0) << "nothing is stored in both types: this graph shows nothing";
}

// Of many rows, a residual is kept, and a product's result is not.
TEST(KeepFloat, AResidualOfManyRows) {
  for (const int64_t rows : {1400, 88000}) {
    GraphBuilder builder;
    const int x = builder.input({rows, 24}, kHalf);
    const int sum = builder.pointwise("add", {x, linear(builder, x, 24)}, kHalf);
    const int mean = builder.reduce("mean", sum, {1}, true, kHalf);
    const int normed = builder.pointwise("sub", {sum, mean}, kHalf);
    builder.copy_out(builder.pointwise("add", {sum, linear(builder, normed, 24)}, kHalf));
    Graph& graph = builder.graph;
    std::vector<ScalarType> types;
    for (const Stage& stage : fp32_intermediates(graph, make_stages(graph), gpu_target("sm_90a", kWorkers)))
      for (const Access& access : stage.accesses)
        if (access.write && graph.buffer_of(access.value).kind == Buffer::Kind::temporary)
          types.push_back(graph.values()[static_cast<size_t>(access.value)].type);
    // The second is larger than 4 MB.
    EXPECT_EQ(types, (Types{kHalf, rows == 1400 ? kWide : kHalf, kHalf, kHalf}));
  }
}

TEST(KeepFloat, ManyRowsAreNotStoredTwiceAsWide) {
  GraphBuilder builder;
  const int x = builder.input({1400, 24}, kHalf);
  builder.copy_out(builder.pointwise("add", {x, linear(builder, x, 24)}, kHalf));
  EXPECT_EQ(written(builder), Types{kHalf});
}

}  // namespace keep_float_test
}  // namespace ark::compiler
