// The table of passes, which docs/design.md shows, and the loop that runs them. See pipeline.hpp.
#include "compiler/passes/pipeline.hpp"

#include <string>
#include <utility>

#include "compiler/passes/cache_policy.hpp"
#include "compiler/passes/dedupe_prefetch.hpp"
#include "compiler/passes/dual_product_fusion.hpp"
#include "compiler/passes/epilogue_fusion.hpp"
#include "compiler/passes/fp32_intermediates.hpp"
#include "compiler/passes/fuse_all_reduce.hpp"
#include "compiler/passes/horizontal_fusion.hpp"
#include "compiler/passes/kv_append.hpp"
#include "compiler/passes/lower_collectives.hpp"
#include "compiler/passes/matmul_tiling.hpp"
#include "compiler/passes/prologue_fusion.hpp"
#include "compiler/passes/scatter_fusion.hpp"
#include "compiler/passes/split_k.hpp"
#include "compiler/passes/split_kv.hpp"
#include "compiler/passes/split_queries.hpp"
#include "compiler/passes/tail_fusion.hpp"
#include "compiler/schedule/events.hpp"
#include "compiler/schedule/memory_planner.hpp"
#include "compiler/schedule/prefetch.hpp"
#include "compiler/schedule/tile.hpp"
#include "compiler/verify/validator.hpp"
#include "util/error.hpp"
#include "util/format.hpp"

namespace ark::compiler {

namespace {

using StagePass = std::vector<Stage>(Graph&, std::vector<Stage>, const Target&);

template <StagePass* pass>
void on_stages(Compilation& now) {
  now.plan.stages = pass(now.plan.graph, std::move(now.plan.stages), now.plan.target);
}
template <void (*pass)(Plan&)>
void on_plan(Compilation& now) {
  pass(now.plan);
}

void lower(Compilation& now) {
  now.plan.stages = make_stages(now.plan.graph);
}
void schedule(Compilation& now) {
  Cut cut = cut_stages(now.plan.graph, now.plan.stages, now.plan.target);
  now.plan.tasks = std::move(cut.tasks);
  now.plan.queues = std::move(cut.queues);
  now.plan.estimated_us = cut.estimated_us;
  now.own = std::move(cut.own);
}
void packets(Compilation& now) {
  now.packets = choose_packets(now.plan, now.own);
}
void events(Compilation& now) {
  add_events(now.plan, now.own, now.packets);
}
void memory(Compilation& now) {
  plan_memory(now.plan, now.own, now.packets);
}
void prefetch(Compilation& now) {
  for (Queue& queue : now.plan.queues)
    for (const int task : queue.tasks) add_loads(now.plan, task, queue.loads);
}
void verify(Compilation& now) {
  validate(now.plan);
}

constexpr auto kStages = Pass::Phase::stages, kSchedule = Pass::Phase::schedule;
constexpr auto kAll = Pass::On::all, kGpu = Pass::On::gpu;
constexpr auto kAny = Pass::Steps::any, kOne = Pass::Steps::one, kSeveral = Pass::Steps::several;

// clang-format off
constexpr Pass kPasses[] = {
    {"make_stages", kStages, kAll, kAny, lower, "each node is in one stage, in an order that is valid to execute"},
    {"fuse_scatters", kStages, kAll, kAny, on_stages<fuse_scatters>, "what one scatter alone copies is computed in its place"},
    {"fuse_dual_products", kStages, kGpu, kAny, on_stages<fuse_dual_products>, "two products of the same rows and the program behind them are one stage"},
    {"fuse_epilogues", kStages, kGpu, kAny, on_stages<fuse_epilogues>, "activations of a product's result are in its stage"},
    {"split_queries", kStages, kGpu, kAny, on_stages<split_queries>, "attention over many queries is in blocks of them"},
    {"split_kv", kStages, kGpu, kAny, on_stages<split_kv>, "attention of few queries over a long cache is in blocks of positions"},
    {"fuse_kv_append", kStages, kGpu, kAny, on_stages<fuse_kv_append>, "attention makes and writes the step's own key and value"},
    {"fp32_intermediates", kStages, kGpu, kAny, on_stages<fp32_intermediates>, "small results between row programs stay float32"},
    {"split_k", kStages, kGpu, kAny, on_stages<split_k>, "deep, narrow products are in parts of their depth"},
    {"tile_matmuls", kStages, kGpu, kAny, on_stages<tile_matmuls>, "each product has the tiles of a GPU's kernel"},
    {"fuse_horizontally", kStages, kGpu, kAny, on_stages<fuse_horizontally>, "products of few rows that share these are one stage"},
    {"fuse_tails", kStages, kGpu, kAny, on_stages<fuse_tails>, "pointwise stages of a task's own columns are its tail"},
    {"lower_collectives", kStages, kGpu, kAny, on_stages<lower_collectives>, "collectives have tiles, and places for packets"},
    {"fuse_all_reduce", kStages, kGpu, kOne, on_stages<fuse_all_reduce>, "products send their partial sums to all ranks themselves"},
    {"schedule", kSchedule, kAll, kAny, schedule, "tasks stand in static queues, in an order that is valid to execute"},
    {"choose_packets", kSchedule, kAll, kAny, packets, "it is known which small results carry their own signal"},
    {"add_events", kSchedule, kAll, kAny, events, "tasks that touch the same bytes are ordered within a step"},
    {"plan_memory", kSchedule, kAll, kAny, memory, "every temporary has a place"},
    {"add_carried_events", kSchedule, kAll, kSeveral, on_plan<add_carried>, "the same is ordered from one step to the next"},
    {"fuse_prologues", kSchedule, kGpu, kAny, on_plan<fuse_prologues>, "a replica and the product behind it are one task"},
    {"choose_cache_policies", kSchedule, kAll, kAny, on_plan<choose_cache_policies>, "each access has a policy"},
    {"prefetch", kSchedule, kAll, kAny, prefetch, "each queue lists what its tasks read of parameters"},
    {"dedupe_prefetch", kSchedule, kGpu, kAny, on_plan<dedupe_prefetch>, "each byte is asked for once, by one of the workers that read it"},
    {"verify", kSchedule, kAll, kAny, verify, "the plan is right: order, memory, tiles, prefetches"},
};
// clang-format on

void run(Compilation& now, Pass::Phase phase, const PassObserver& observer) {
  int number = 0;
  for (const Pass& pass : kPasses) {
    ++number;
    if (pass.phase != phase || !pass.takes(now.plan)) continue;
    pass.run(now);
    if (observer) observer(pass, number, now);
  }
}

Compilation begin(Graph graph, const Target& target, bool multi_step) {
  if (target.workers < 1 || target.page_bytes < 1) {
    throw Error(
        ErrorKind::invalid_argument,
        formatted(
            "a plan needs at least one worker and pages of at least one byte, not {} workers and pages of {} bytes",
            target.workers, target.page_bytes));
  }
  Compilation now;
  now.plan.target = target;
  now.plan.graph = std::move(graph);
  now.plan.multi_step = multi_step;
  return now;
}

}  // namespace

bool Pass::takes(const Plan& plan) const {
  if (on == On::gpu && plan.target.name == "cpu") return false;
  return steps == Steps::any || (steps == Steps::several) == plan.multi_step;
}

std::span<const Pass> pipeline() {
  return kPasses;
}

Plan make_plan(Graph graph, const Target& target, bool multi_step, const PassObserver& observer) {
  Compilation now = begin(std::move(graph), target, multi_step);
  run(now, Pass::Phase::stages, observer);
  run(now, Pass::Phase::schedule, observer);
  return std::move(now.plan);
}

Plan plan_stages(Graph graph, std::vector<Stage> stages, const Target& target, bool multi_step) {
  Compilation now = begin(std::move(graph), target, multi_step);
  now.plan.stages = std::move(stages);
  run(now, Pass::Phase::schedule, nullptr);
  return std::move(now.plan);
}

}  // namespace ark::compiler
