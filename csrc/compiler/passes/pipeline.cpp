// A plan from a graph: stages, tiles on workers, events, memory, the loaders' lists; then the validator has its say.
#include <string>
#include <utility>

#include "compiler/passes/cache_policy.hpp"
#include "compiler/passes/epilogue_fusion.hpp"
#include "compiler/passes/fp32_intermediates.hpp"
#include "compiler/passes/fuse_all_reduce.hpp"
#include "compiler/passes/horizontal_fusion.hpp"
#include "compiler/passes/kv_append.hpp"
#include "compiler/passes/lower_collectives.hpp"
#include "compiler/passes/matmul_tiling.hpp"
#include "compiler/passes/prologue_fusion.hpp"
#include "compiler/passes/split_k.hpp"
#include "compiler/passes/split_queries.hpp"
#include "compiler/passes/tail_fusion.hpp"
#include "compiler/schedule/events.hpp"
#include "compiler/schedule/memory_planner.hpp"
#include "compiler/schedule/plan.hpp"
#include "compiler/schedule/prefetch.hpp"
#include "compiler/schedule/tile.hpp"
#include "util/error.hpp"

namespace ark::compiler {

Plan plan_stages(Graph graph, std::vector<Stage> stages, const Target& target, bool chained) {
  if (target.workers < 1 || target.page_bytes < 1) {
    throw Error(ErrorKind::invalid_argument, "a plan needs at least one worker and pages of at least one byte, not " +
                                                 std::to_string(target.workers) + " workers and pages of " +
                                                 std::to_string(target.page_bytes) + " bytes");
  }
  Plan plan;
  plan.target = target;
  plan.graph = std::move(graph);
  plan.stages = std::move(stages);
  plan.chained = chained;
  Cut cut = cut_stages(plan.graph, plan.stages, target);
  plan.tasks = std::move(cut.tasks);
  plan.queues = std::move(cut.queues);
  plan.estimated_us = cut.estimated_us;
  const std::vector<bool> packets = choose_packets(plan, cut.own);
  add_events(plan, cut.own, packets);
  plan_memory(plan, cut.own, packets);
  if (chained) add_carried(plan);
  if (target.name != "cpu") fuse_prologues(plan);
  choose_cache_policies(plan);
  for (Queue& queue : plan.queues) {
    for (const int task : queue.tasks) add_loads(plan, task, queue.loads);
  }
  validate(plan);
  return plan;
}

Plan make_plan(Graph graph, const Target& target, bool chained) {
  std::vector<Stage> stages = make_stages(graph);
  if (target.name != "cpu") {
    stages = fuse_epilogues(graph, std::move(stages));
    for (const auto pass :
         {split_queries, fuse_kv_append, fp32_intermediates, split_k, tile_matmuls, fuse_horizontally, fuse_tails})
      stages = pass(graph, std::move(stages), target.workers);
    stages = lower_collectives(graph, std::move(stages));
    if (!chained) stages = fuse_all_reduce(graph, std::move(stages), target);
  }
  return plan_stages(std::move(graph), std::move(stages), target, chained);
}

}  // namespace ark::compiler
