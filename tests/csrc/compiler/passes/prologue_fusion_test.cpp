// Tests which tasks of a GPU's plan start with another task (Task::head), what data stays on the SM, and that the
// validator refuses heads that a single run could not compute.
#include "compiler/passes/prologue_fusion.hpp"
#include "compiler/passes/pipeline.hpp"
#include "compiler/verify/validator.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>

#include "compiler/emit/cuda/emit_cuda.hpp"
#include "compiler/graph/graph_builder.hpp"
#include "compiler/schedule/targets.hpp"
#include "util/error.hpp"

namespace ark::compiler {
namespace join_tasks_test {

constexpr int kWorkers = 6;
constexpr int64_t kWidth = 512;

// A sum, which is kept, and its norm. Returns both.
std::pair<int, int> norm(GraphBuilder& builder, int a, int b) {
  const int sum = builder.pointwise("add", {a, b});
  const int mean = builder.reduce("mean", builder.pointwise("mul", {sum, sum}), {1});
  return {sum, builder.pointwise("mul", {sum, builder.pointwise("rsqrt", {mean})})};
}

int linear(GraphBuilder& builder, int a) {
  return builder.matmul(a, builder.transpose(builder.parameter({kWidth, kWidth})));
}

// Two norms, each before a product. The second one adds to the first one's sum.
Plan two_norms(int64_t rows, const std::string& target = "sm_90a", bool multi_step = false) {
  GraphBuilder builder;
  const int a = linear(builder, builder.input({rows, kWidth}));
  const auto [sum, normed] = norm(builder, a, builder.input({rows, kWidth}));
  builder.copy_out(linear(builder, norm(builder, linear(builder, normed), sum).second));
  return make_plan(builder.graph, target == "cpu" ? target_named("cpu", kWorkers) : gpu_target(target, kWorkers),
                   multi_step);
}

int joined(const Plan& plan) {
  int count = 0;
  for (const Task& task : plan.tasks) count += task.head >= 0;
  return count;
}

std::string verdict(const Plan& plan) {
  try {
    validate(plan);
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

TEST(JoinedTasks, NormsAreTheFirstHalvesOfTheirProducts) {
  for (const bool multi_step : {false, true}) {
    const Plan plan = two_norms(1, "sm_90a", multi_step);
    EXPECT_EQ(joined(plan), 2 * kWorkers);
    for (const Queue& queue : plan.queues) {
      const Queue runs = in_one_go(plan, queue);
      EXPECT_EQ(runs.tasks.size(), queue.tasks.size() - 2);
      EXPECT_EQ(runs.loads.size(), queue.loads.size());
      for (const int task : runs.tasks) EXPECT_FALSE(plan.tasks[static_cast<size_t>(task)].replica);
    }
    for (size_t task = 0; task < plan.tasks.size(); ++task) {
      if (plan.tasks[task].head < 0) continue;
      EXPECT_TRUE(plan.tasks[task].waits.empty());
      EXPECT_FALSE(waits_of(plan, static_cast<int>(task)).empty());
    }
  }
}

TEST(JoinedTasks, WhatOnlyTheProductReadsStaysOnTheSm) {
  const Plan plan = two_norms(1);
  int kept = 0;
  for (size_t stage = 0; stage < plan.stages.size(); ++stage) {
    const int head = head_stage(plan, static_cast<int>(stage));
    if (head < 0) continue;
    const std::vector<int> buffers = kept_in(plan, static_cast<int>(stage), kWidth * 4);
    ASSERT_EQ(buffers.size(), 1u);  // not the sum, which the second norm reads
    EXPECT_EQ(buffers[0], plan.graph.values()[std::get<MatmulStage>(plan.stages[stage].body).a].buffer);
    EXPECT_TRUE(kept_in(plan, static_cast<int>(stage), kWidth * 4 - 1).empty());
    ++kept;
  }
  EXPECT_EQ(kept, 2);
  const std::string source = emit_cuda(plan).text;
  EXPECT_NE(source.find("kept_bytes()"), std::string::npos);
  EXPECT_NE(source.find("rows_matmul_"), std::string::npos);
}

TEST(JoinedTasks, OnlyInFrontOfFewRowsOnAGpu) {
  EXPECT_EQ(joined(two_norms(1, "cpu")), 0);
  EXPECT_EQ(joined(two_norms(8)), 0);
}

TEST(JoinedTasks, TheValidatorRefusesWhatOneRunCannotDo) {
  const Plan plan = two_norms(1);
  EXPECT_EQ(verdict(plan), "");
  int whole = 0;
  while (plan.tasks[static_cast<size_t>(whole)].head < 0) ++whole;
  const auto broken = [&](auto&& change) {
    Plan other = plan;
    Task& task = other.tasks[static_cast<size_t>(whole)];
    change(other, task, other.tasks[static_cast<size_t>(task.head)]);
    return verdict(other);
  };
  const auto says = [](const std::string& text, const char* what) { return text.find(what) != std::string::npos; };
  EXPECT_TRUE(says(broken([](Plan& all, Task& task, Task&) {
                     for (const int other : all.queues[static_cast<size_t>(task.worker)].tasks)
                       if (other != task.head) task.head = std::min(task.head, other);
                   }),
                   "not the one before it"));
  EXPECT_TRUE(says(broken([](Plan&, Task& task, Task& head) { std::swap(task.waits, head.waits); }), "and waits"));
  EXPECT_TRUE(says(broken([](Plan&, Task& task, Task& head) { std::swap(task.signals, head.signals); }), "signals"));
}

}  // namespace join_tasks_test
}  // namespace ark::compiler
