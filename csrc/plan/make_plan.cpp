// A plan from a graph: stages, tiles on workers, events, memory, the loaders' lists; then the validator has its say.
#include <string>
#include <utility>

#include "error.hpp"
#include "plan/append_positions.hpp"
#include "plan/cache_policy.hpp"
#include "plan/events.hpp"
#include "plan/finish_products.hpp"
#include "plan/join_pointwise.hpp"
#include "plan/join_tasks.hpp"
#include "plan/keep_float.hpp"
#include "plan/loads.hpp"
#include "plan/merge_products.hpp"
#include "plan/place.hpp"
#include "plan/plan.hpp"
#include "plan/push_sums.hpp"
#include "plan/split_attention.hpp"
#include "plan/split_depth.hpp"
#include "plan/split_products.hpp"
#include "plan/spread_collectives.hpp"
#include "plan/tile.hpp"

namespace ark::plan {

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
  place_buffers(plan, cut.own, packets);
  if (chained) add_carried(plan);
  if (target.name != "cpu") join_tasks(plan);
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
    stages = finish_products(graph, std::move(stages));
    for (const auto pass :
         {split_attention, append_positions, keep_float, split_depth, split_products, merge_products, join_pointwise})
      stages = pass(graph, std::move(stages), target.workers);
    stages = spread_collectives(graph, std::move(stages));
    if (!chained) stages = push_sums(graph, std::move(stages), target);
  }
  return plan_stages(std::move(graph), std::move(stages), target, chained);
}

}  // namespace ark::plan
