// Plans run right in any order that their queues and events allow, take no more memory than eager, and are made fast.
#include "plan/plan.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "plan/random_stages.hpp"
#include "plan/simulated_plan.hpp"

namespace ark::plan {
namespace {

using test::RandomStages;
using test::SimulatedPlan;
using test::StageGraph;

Target target_of(int workers) {
  Target target;
  target.workers = workers;
  target.bytes_per_us = 5e3;
  return target;
}

TEST(PlanTest, AnyInterleavingGivesTheSequentialResult) {
  int64_t waits = 0, replicas = 0, reused = 0, plans = 0;
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    StageGraph made = RandomStages(seed).make(static_cast<int>(seed % 17) + 2);
    const int workers = static_cast<int>(seed % 5) + 1;
    const Plan plan = plan_stages(std::move(made.graph), std::move(made.stages), target_of(workers));
    SimulatedPlan simulated(plan);
    const auto expected = simulated.in_program_order();
    for (uint64_t run = 0; run < 30; ++run) {
      ASSERT_EQ(simulated.interleaved(seed * 1000 + run), expected) << "graph " << seed << ", run " << run;
    }
    ++plans;
    int64_t bytes = 0;
    for (const Task& task : plan.tasks) waits += task.waits.size(), replicas += task.replica;
    for (size_t buffer = 0; buffer < plan.placements.size(); ++buffer) {
      if (plan.placements[buffer].offset >= 0) bytes += plan.graph.buffers()[buffer].bytes;
    }
    reused += bytes > plan.arena_bytes + plan.own_bytes;
  }
  // The graphs do ask for what is tested.
  EXPECT_GT(waits, 1000);
  EXPECT_GT(replicas, 100);
  EXPECT_GT(reused, 50);
}

TEST(PlanTest, ChainedStepsGiveTheSequentialResult) {
  int64_t carried = 0, tasks = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    StageGraph made = RandomStages(seed).make(static_cast<int>(seed % 17) + 2);
    const int workers = static_cast<int>(seed % 4) + 2;
    const Plan plan = plan_stages(std::move(made.graph), std::move(made.stages), target_of(workers), true);
    SimulatedPlan simulated(plan);
    const auto expected = simulated.in_program_order(4);
    for (uint64_t run = 0; run < 20; ++run) {
      ASSERT_EQ(simulated.interleaved(seed * 1000 + run, 4), expected) << "graph " << seed << ", run " << run;
    }
    tasks += plan.tasks.size();
    for (const Task& task : plan.tasks) carried += task.carried.size();
  }
  EXPECT_GT(carried, 200);
  EXPECT_LT(carried, tasks);
}

}  // namespace
}  // namespace ark::plan
