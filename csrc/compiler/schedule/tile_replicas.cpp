// Groups stages that must be replicated together, and removes replicas whose copy has no reader. See tile_replicas.hpp.
#include "compiler/schedule/tile_replicas.hpp"

#include <algorithm>
#include <numeric>
#include <utility>
#include <variant>

namespace ark::compiler {

ReplicaGroups::ReplicaGroups(const Graph& graph, const std::vector<Stage>& stages, const Target& target)
    : group_(stages.size()), may_replicate_(stages.size(), 1), choice_(stages.size(), Choice::open) {
  std::iota(group_.begin(), group_.end(), 0);
  const auto root = [&](int stage) {
    while (group_[stage] != stage) stage = group_[stage] = group_[group_[stage]];
    return stage;
  };
  std::vector<int> writer(graph.buffers().size(), -1);
  const auto each_write = [&](auto&& visit) {
    for (int stage = 0; stage < static_cast<int>(stages.size()); ++stage) {
      for (const Access& access : stages[stage].accesses) {
        if (access.write) visit(stage, graph.values()[access.value].buffer);
      }
    }
  };
  each_write([&](int stage, int buffer) {
    if (writer[buffer] >= 0) group_[root(stage)] = root(writer[buffer]);
    writer[buffer] = stage;
  });
  for (int stage = 0; stage < static_cast<int>(stages.size()); ++stage) {
    group_[stage] = root(stage);
    const bool collective = std::holds_alternative<CollectiveStage>(stages[stage].body);
    if (std::holds_alternative<StopStage>(stages[stage].body)) {
      choice_[stage] = Choice::replicated;
      continue;
    }
    if (!stages[stage].replicable || collective || target.workers == 1) may_replicate_[group_[stage]] = 0;
  }
  each_write([&](int stage, int buffer) {
    if (graph.buffers()[buffer].kind != Buffer::Kind::temporary) may_replicate_[group_[stage]] = 0;
  });
}

void drop_unread_replicas(const Graph& graph, const std::vector<Stage>& stages, Cut& cut) {
  std::vector<std::vector<char>> read(cut.queues.size(), std::vector<char>(graph.buffers().size(), 0));
  std::vector<char> kept(cut.tasks.size(), 1);
  std::vector<int> left(stages.size(), 0);
  for (const Task& task : cut.tasks) ++left[task.stage];
  bool dropped = false;
  for (size_t index = cut.tasks.size(); index-- > 0;) {
    const Task& task = cut.tasks[index];
    const Stage& stage = stages[task.stage];
    if (task.replica && left[task.stage] > 1 && !std::holds_alternative<StopStage>(stage.body)) {
      const bool needed = std::any_of(stage.accesses.begin(), stage.accesses.end(), [&](const Access& access) {
        return access.write && read[task.worker][graph.values()[access.value].buffer];
      });
      if (!needed) {
        kept[index] = 0;
        --left[task.stage];
        dropped = true;
        continue;
      }
    }
    for (const Access& access : stage.accesses) {
      const int buffer = graph.values()[access.value].buffer;
      if (!access.write && buffer >= 0) read[task.worker][buffer] = 1;
    }
  }
  if (!dropped) return;
  std::vector<Task> tasks;
  for (Queue& queue : cut.queues) queue.tasks.clear();
  for (size_t index = 0; index < cut.tasks.size(); ++index) {
    if (!kept[index]) continue;
    cut.queues[cut.tasks[index].worker].tasks.push_back(static_cast<int>(tasks.size()));
    tasks.push_back(std::move(cut.tasks[index]));
  }
  cut.tasks = std::move(tasks);
}

}  // namespace ark::compiler
