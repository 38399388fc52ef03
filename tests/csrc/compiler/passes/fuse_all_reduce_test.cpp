// Tests sums over ranks that products push to the ranks and readers add: when they are used, where they are stored, and
// what is emitted.
#include "compiler/passes/fuse_all_reduce.hpp"
#include "compiler/graph/stage_queries.hpp"
#include "compiler/passes/pipeline.hpp"
#include "compiler/verify/validator.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "compiler/emit/common/emit_tables.hpp"
#include "compiler/emit/cuda/emit_cuda.hpp"
#include "compiler/emit/cuda_tables.hpp"
#include "compiler/graph/graph_builder.hpp"
#include "compiler/passes/lower_collectives.hpp"
#include "compiler/runtime/step_failure.hpp"
#include "compiler/schedule/targets.hpp"
#include "util/error.hpp"

namespace ark::compiler {
namespace push_sums_test {

constexpr int64_t kWidth = 512;

struct Form {
  int64_t rows = 1;
  ScalarType type = ScalarType::bf16;
  std::string reduce_op = "sum";
  bool part_is_read = false;   // something else reads the product's own result
  bool sum_is_result = false;  // the sum is a result of the step
  bool sum_is_rows = false;    // a product's rows are the sum
  bool merged = false;         // with another product of the same rows
  bool multi_step = false;
};

// A product, its sum over two ranks, and the readers of the sum: a residual with a reduction, and the next product.
Plan summed(const Form& form) {
  GraphBuilder make;
  const ScalarType type = form.type;
  const auto linear = [&](int a) {
    return make.matmul(a, make.transpose(make.parameter({kWidth, kWidth}, type)), -1, type);
  };
  const int x = make.input({form.rows, kWidth}, type), part = linear(x);
  if (form.merged) make.copy_out(linear(linear(x)));
  if (form.part_is_read) make.copy_out(make.pointwise("mul", {part, part}, type));
  const int to =
      form.sum_is_result ? make.output({form.rows, kWidth}, type) : make.temporary({form.rows, kWidth}, type);
  const int sum = make.into(to, "all_reduce", {part},
                            {{"group", int64_t{0}}, {"ranks", int64_t{2}}, {"reduce_op", form.reduce_op}});
  if (form.sum_is_rows) make.copy_out(linear(sum));
  const int moved = make.pointwise("add", {x, sum}, type);
  const int mean = make.reduce("mean", make.pointwise("mul", {moved, moved}, type), {1}, true, type);
  make.copy_out(linear(make.pointwise("mul", {moved, make.pointwise("rsqrt", {mean}, type)}, type)));
  return make_plan(make.graph, gpu_target("sm_90a", 6), form.multi_step);
}

// Counts stages that are collectives, and buffers that hold pushed sums.
std::pair<int, int> counts(const Plan& plan) {
  return {static_cast<int>(std::count_if(plan.stages.begin(), plan.stages.end(), is_spread)),
          static_cast<int>(std::count_if(plan.placements.begin(), plan.placements.end(),
                                         [](const Placement& one) { return one.pushed.ranks > 0; }))};
}

TEST(PushSums, WhatFewRowsMakeAndReadersPoll) {
  const std::pair<int, int> pushed{0, 1}, not_pushed{1, 0};
  for (const ScalarType type : {ScalarType::bf16, ScalarType::f16, ScalarType::f32}) {
    EXPECT_EQ(counts(summed({.type = type})), pushed);
    EXPECT_EQ(counts(summed({.rows = 4, .type = type})), pushed);
    EXPECT_EQ(counts(summed({.rows = 8, .type = type})), not_pushed);
  }
  EXPECT_EQ(counts(summed({.merged = true})), pushed);
  EXPECT_EQ(counts(summed({.reduce_op = "avg"})), not_pushed);
  EXPECT_EQ(counts(summed({.part_is_read = true})), not_pushed);
  EXPECT_EQ(counts(summed({.sum_is_result = true})), not_pushed);
  EXPECT_EQ(counts(summed({.sum_is_rows = true})), not_pushed);
  EXPECT_EQ(counts(summed({.multi_step = true})), not_pushed);
}

TEST(PushSums, LieInTheMemoryOfAllRanks) {
  const Plan plan = summed({});
  const auto buffer = static_cast<int>(std::find_if(plan.placements.begin(), plan.placements.end(),
                                                    [](const Placement& one) { return one.pushed.ranks > 0; }) -
                                       plan.placements.begin());
  int value = 0;
  while (plan.graph.values()[static_cast<size_t>(value)].buffer != buffer) ++value;
  EXPECT_EQ(place_of(plan, value, 6).base, Place::packets);
  EXPECT_EQ(place_of(plan, value, 6).offset, 12);
  EXPECT_EQ(exchanges_of(plan.graph, plan.stages).bytes, 2 * 2 * 2 * kWidth * 2);
  const std::string text = emit_cuda(plan).text;
  for (const char* const line :
       {"  Packet<bf16, 2, 2048>* const p2 = aligned(in_turn<Packet<bf16, 2, 2048>>(p[2], 4096));",
        "const Packet<bf16, 2, 2048>* const p0 = aligned(in_turn<const Packet<bf16, 2, 2048>>(p[0], 4096));",
        "kPushes = true"})
    EXPECT_NE(text.find(line), std::string::npos) << line << "\n" << text;
  EXPECT_TRUE(std::ranges::any_of(table_in<loop::Operand>(text, "kOperands"), [](const loop::Operand& one) {
    return one.base == loop::Operand::packets && one.offset == 0;
  }));
  EXPECT_EQ(emit_cuda(summed({.reduce_op = "avg"})).text.find("pushed.cuh"), std::string::npos);
}

// An error about a missing sum must name the sum and the rank that did not send it.
TEST(PushSums, WhatALostRankHasNotSent) {
  const Plan plan = summed({});
  for (size_t task = 0; task < plan.tasks.size(); ++task) {
    const std::string text =
        describe_left(plan, {.kind = StepFailure::Kind::peer, .task = static_cast<int>(task), .value = 1});
    const auto reads = [&](int index) {
      if (index < 0) return false;
      const auto& all = plan.stages[static_cast<size_t>(plan.tasks[static_cast<size_t>(index)].stage)].accesses;
      return std::any_of(all.begin(), all.end(), [&](const Access& one) {
        const int buffer = plan.graph.values()[static_cast<size_t>(one.value)].buffer;
        return !one.write && plan.placements[static_cast<size_t>(buffer)].pushed.ranks > 0;
      });
    };
    const bool any = reads(static_cast<int>(task)) || reads(plan.tasks[task].head);
    EXPECT_EQ(text.find("the part of rank 1 of all_reduce") != std::string::npos, any) << text;
  }
}

TEST(PushSums, TheValidatorLooksAtTheirPlaces) {
  for (const auto& spoil :
       {+[](Placement& one) { one.packets = false; }, +[](Placement& one) { one.offset = 0; },
        +[](Placement& one) { one.pushed.half = 2048; }, +[](Placement& one) { one.pushed.apart = 1024; }}) {
    Plan plan = summed({});
    spoil(*std::find_if(plan.placements.begin(), plan.placements.end(),
                        [](const Placement& one) { return one.pushed.ranks > 0; }));
    EXPECT_THROW(validate(plan), Error);
  }
}

}  // namespace push_sums_test
}  // namespace ark::compiler
