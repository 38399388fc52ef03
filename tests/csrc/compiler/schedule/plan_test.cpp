// Tests that plans compute correct results in any order that their queues and events allow, need no more memory than
// eager, and are made quickly.
#include "compiler/schedule/plan.hpp"
#include "compiler/passes/pipeline.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "compiler/fuse/random_stages.hpp"
#include "compiler/graph/graph_builder.hpp"
#include "compiler/graph/random_graph.hpp"
#include "compiler/passes/llama_stages.hpp"
#include "compiler/schedule/simulated_plan.hpp"
#include "util/error.hpp"

namespace ark::compiler {
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
  for (uint64_t seed = 1; seed <= 200; ++seed) {
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
  // The random graphs must exercise these features.
  EXPECT_GT(waits, 500);
  EXPECT_GT(replicas, 50);
  EXPECT_GT(reused, 25);
}

TEST(PlanTest, ChainedStepsGiveTheSequentialResult) {
  int64_t carried = 0, tasks = 0;
  for (uint64_t seed = 1; seed <= 80; ++seed) {
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
  EXPECT_GT(carried, 80);
  EXPECT_LT(carried, tasks);
}

TEST(PlanTest, PacketsGiveTheSequentialResult) {
  int64_t packets = 0, counters = 0;
  for (uint64_t seed = 1; seed <= 80; ++seed) {
    StageGraph made = RandomStages(seed).make(static_cast<int>(seed % 17) + 2);
    Target target = target_of(static_cast<int>(seed % 4) + 2);
    target.packets = true;
    const Plan plan = plan_stages(std::move(made.graph), std::move(made.stages), target);
    SimulatedPlan simulated(plan);
    const auto expected = simulated.in_program_order();
    for (uint64_t run = 0; run < 20; ++run) ASSERT_EQ(simulated.interleaved(seed * 1000 + run), expected) << seed;
    for (const Event& event : plan.events) (event.packets ? packets : counters) += 1;
    // Nothing else may use a word of a packet.
    for (size_t a = 0; a < plan.placements.size(); ++a) {
      for (size_t b = 0; b < plan.placements.size(); ++b) {
        const Placement& one = plan.placements[a];
        const Placement& two = plan.placements[b];
        if (a == b || !one.packets || two.own || two.offset < 0) continue;
        const int64_t end = two.offset + plan.graph.buffers()[b].bytes * (two.packets ? 2 : 1);
        EXPECT_TRUE(end <= one.offset || one.offset + plan.graph.buffers()[a].bytes * 2 <= two.offset);
      }
    }
  }
  EXPECT_GT(packets, 100);
  EXPECT_GT(counters, 50);
}

// Graphs of real operators, grouped by make_stages(), on a machine with cheap waits, which cuts as finely as possible.
TEST(PlanTest, RandomGraphsRunInAnyInterleaving) {
  int64_t waits = 0, tiles = 0;
  for (uint32_t seed = 1; seed <= 500; ++seed) {
    Graph graph = RandomGraph(seed).graph();
    std::vector<Stage> stages = make_stages(graph);
    Target target = target_of(static_cast<int>(seed % 4) + 2);
    target.wait_us = 0.01;
    target.task_us = 0.001;
    target.bytes_per_us = target.cached_bytes_per_us = 100;
    const Plan plan = plan_stages(graph, stages, target);
    SimulatedPlan simulated(plan);
    const auto expected = simulated.in_program_order();
    for (uint64_t run = 0; run < 10; ++run) ASSERT_EQ(simulated.interleaved(run, 1), expected) << "graph " << seed;
    for (const Task& task : plan.tasks) {
      waits += task.waits.size();
      tiles += !task.replica && task.end - task.begin < plan.stages[task.stage].extent;
    }
  }
  EXPECT_GT(waits, 300);
  EXPECT_GT(tiles, 1000);
}

// With one worker, the arena holds what eager would hold at once, rounded up to the alignment.
TEST(PlanTest, TakesNoMoreMemoryThanEager) {
  for (uint32_t seed = 1; seed <= 500; ++seed) {
    const Graph graph = RandomGraph(seed).graph();
    const Plan plan = make_plan(graph, target_of(1));
    int64_t rounded = 0;
    for (const Placement& placement : plan.placements) rounded += placement.offset >= 0 ? 64 : 0;
    EXPECT_LE(plan.arena_bytes, plan.eager_peak_bytes + rounded) << "graph " << seed;
  }
}

// A chain of buffers with two alive at a time, as in eager.
TEST(PlanTest, ChainsReuseTheirBuffers) {
  GraphBuilder builder;
  const int64_t lengths[] = {4096, 512, 8192, 64, 4096, 4096, 2048};
  std::vector<Stage> stages;
  int last = builder.input({1024}, ScalarType::f32);
  int64_t peak = 0;
  for (size_t index = 0; index < std::size(lengths); ++index) {
    const int next = builder.temporary({lengths[index]}, ScalarType::f32);
    Stage stage;
    stage.accesses = {{last, -1, false}, {next, -1, true}};
    stages.push_back(stage);
    peak = std::max(peak, lengths[index] * 4 + (index > 0 ? lengths[index - 1] * 4 : 0));
    last = next;
  }
  const Plan plan = plan_stages(builder.graph, stages, target_of(1));
  EXPECT_EQ(plan.arena_bytes, peak);
}

StageGraph llama(int layers) {
  test::LlamaSizes sizes;
  sizes.layers = layers;
  return test::LlamaStages(sizes).make();
}

// Four waits per layer and worker: for the attention heads, the sum after wo, the product, and the sum after w2. Stages
// that are cut the same way on both sides need no wait.
TEST(PlanTest, LlamaWaitsOnlyWhereAllMeet) {
  for (const int workers : {2, 4, 8}) {
    StageGraph made = llama(3);
    const Plan plan = plan_stages(std::move(made.graph), std::move(made.stages), target_of(workers));
    size_t waits = 0;
    for (const Task& task : plan.tasks) waits += task.waits.size();
    EXPECT_EQ(waits, static_cast<size_t>(3 * 4 * workers));
    EXPECT_EQ(plan.events.size(), 3u * 4u);
    std::vector<double> load(workers, 0);
    for (const Task& task : plan.tasks) load[task.worker] += task.cost_us;
    const auto [least, most] = std::minmax_element(load.begin(), load.end());
    EXPECT_LT(*most, *least * 1.05);
  }
}

// On a GPU, data crosses SMs as packets, except for the caches, which are written in place.
TEST(PlanTest, LlamaOnAGpuCrossesByPackets) {
  StageGraph made = llama(2);
  Target target = target_of(132);
  target.name = "sm_90a";
  target.packets = true;
  target.flops_per_us = 4e5;
  target.bytes_per_us = 25e3;
  target.cached_bytes_per_us = 4e4;
  const Plan plan = plan_stages(std::move(made.graph), std::move(made.stages), target);
  EXPECT_GT(plan.events.size(), 8u);
  int64_t cached = 0;
  for (const Task& task : plan.tasks) {
    const std::string& kind = plan.stages[task.stage].kind;
    for (const int event : task.waits) {
      if (plan.events[event].packets) continue;
      ++cached;
      EXPECT_EQ(kind, "attention");
    }
  }
  for (size_t buffer = 0; buffer < plan.placements.size(); ++buffer) {
    const Placement& placement = plan.placements[buffer];
    EXPECT_TRUE(!placement.packets || plan.graph.buffers()[buffer].bytes <= 32768);
  }
  EXPECT_LE(cached, 2 * 2 * 8);  // keys and values of each head's task
}

// Exactly one worker loads every byte of every weight, in pages of the ring.
TEST(PlanTest, LoadsEveryWeightOnce) {
  for (const int workers : {1, 3, 8}) {
    StageGraph made = llama(2);
    const Plan plan = plan_stages(std::move(made.graph), std::move(made.stages), target_of(workers));
    std::vector<int64_t> loaded(plan.graph.buffers().size(), 0);
    for (const Queue& queue : plan.queues) {
      for (const Load& load : queue.loads) {
        loaded[plan.graph.values()[load.value].buffer] += load.bytes * load.rows;
        EXPECT_LE(load.bytes * load.rows, plan.target.page_bytes);
      }
    }
    int64_t weights = 0;
    for (const Stage& stage : plan.stages) {
      const auto* matmul = std::get_if<MatmulStage>(&stage.body);
      if (matmul == nullptr) continue;
      const int buffer = plan.graph.values()[matmul->b].buffer;
      EXPECT_EQ(loaded[buffer], plan.graph.buffers()[buffer].bytes);
      weights += loaded[buffer];
    }
    EXPECT_GT(weights, int64_t{500} << 20);
  }
}

TEST(PlanTest, RefusesATargetWithoutWorkers) {
  StageGraph made = llama(1);
  EXPECT_THROW(plan_stages(made.graph, made.stages, target_of(0)), Error);
  Target no_pages = target_of(2);
  no_pages.page_bytes = 0;
  EXPECT_THROW(plan_stages(made.graph, made.stages, no_pages), Error);
}

}  // namespace
}  // namespace ark::compiler
