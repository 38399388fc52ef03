// A plan from stages: tiles on workers, events, memory, the loaders' lists; then the validator has its say.
#include <algorithm>
#include <utility>

#include "error.hpp"
#include "plan/events.hpp"
#include "plan/place.hpp"
#include "plan/plan.hpp"
#include "plan/region.hpp"
#include "plan/tile.hpp"

namespace ark::plan {

namespace {

// A table's rows are known only when the index is.
bool read_as_whole(const Stage& stage, int value) {
  if (const auto* gather = std::get_if<GatherStage>(&stage.body)) return value != gather->table;
  return true;
}

// What task `index` reads of parameters, cut into pages, in the order of its accesses.
void add_loads(const Plan& plan, int index, std::vector<Load>& loads) {
  const Task& task = plan.tasks[index];
  const Stage& stage = plan.stages[task.stage];
  const int64_t page = plan.target.page_bytes;
  std::vector<std::pair<int, Region>> seen;
  for (const Access& access : stage.accesses) {
    const int buffer = plan.graph.values()[access.value].buffer;
    if (access.write || buffer < 0) continue;
    const Buffer& what = plan.graph.buffers()[buffer];
    if (!what.parameter || what.mutated || !read_as_whole(stage, access.value)) continue;
    const Region region = region_of(plan.graph, stage, access, task.begin, task.end);
    const auto again = [&](const auto& other) { return other.first == buffer && covers(other.second, region); };
    if (region.empty() || std::any_of(seen.begin(), seen.end(), again)) continue;
    seen.push_back({buffer, region});
    each_piece(region, [&](int64_t offset, int64_t rows, int64_t stride) {
      const int64_t at_once = std::max<int64_t>(1, page / region.width);  // rows a page
      for (int64_t row = 0; row < rows; row += at_once) {
        const int64_t count = std::min(at_once, rows - row);
        for (int64_t done = 0; done < region.width; done += page) {
          const int64_t bytes = std::min(page, region.width - done);
          loads.push_back({index, access.value, offset + row * stride + done, bytes, count, count > 1 ? stride : 0});
        }
      }
    });
  }
}

}  // namespace

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
  add_events(plan, cut.own);
  place_buffers(plan, cut.own);
  if (chained) add_carried(plan);
  for (Queue& queue : plan.queues) {
    for (const int task : queue.tasks) add_loads(plan, task, queue.loads);
  }
  validate(plan);
  return plan;
}

}  // namespace ark::plan
