// List scheduling of stages with estimated times: for each stage, cuts its axis in several ways and commits the cut
// that ends first. See tile.hpp.
#include "compiler/schedule/tile.hpp"
#include "compiler/graph/stage_queries.hpp"

#include <algorithm>
#include <utility>

#include "compiler/graph/box.hpp"
#include "compiler/schedule/box_history.hpp"
#include "compiler/schedule/tile_cuts.hpp"
#include "compiler/schedule/tile_ready.hpp"
#include "compiler/schedule/tile_replicas.hpp"

namespace ark::compiler {

namespace {

struct Choice {
  Bounds bounds;
  std::vector<int> workers;     // by tile
  std::vector<double> finish;   // by tile
  std::vector<double> cost_us;  // by tile
  double end = 0;
  bool replicas = false;
};

class Cutter {
 public:
  Cutter(const Graph& graph, const std::vector<Stage>& stages, const Target& target)
      : graph_(graph),
        stages_(stages),
        target_(target),
        history_(graph, stages),
        groups_(graph, stages, target),
        free_(target.workers, 0) {
    cut_.queues.resize(target.workers);
    cut_.own.resize(graph.buffers().size(), false);
    bounds_.resize(stages.size());
  }

  Cut run() {
    for (int stage = 0; stage < static_cast<int>(stages_.size()); ++stage) {
      if (stages_[stage].extent > 0) commit(stage, choose(stage));
    }
    drop_unread_replicas(graph_, stages_, cut_);
    cut_.estimated_us = *std::max_element(free_.begin(), free_.end());
    return std::move(cut_);
  }

 private:
  Choice choose(int stage);
  Choice cut_at(int stage, Bounds bounds);
  Choice replicate(int stage);
  void commit(int stage, const Choice& choice);
  bool handed_around(int stage) const;

  const Graph& graph_;
  const std::vector<Stage>& stages_;
  const Target& target_;
  BoxHistory history_;
  ReplicaGroups groups_;
  Cut cut_;
  std::vector<double> free_;    // by worker: when its queue ends so far
  std::vector<double> finish_;  // by task
  std::vector<Bounds> bounds_;  // by stage
};

Choice Cutter::cut_at(int stage, Bounds bounds) {
  const Stage& what = stages_[stage];
  const int tiles = static_cast<int>(bounds.size()) - 1;
  Choice choice;
  choice.bounds = std::move(bounds);
  const auto collect = [&](const Access& access, int64_t begin, int64_t end, Ready& ready) {
    const int buffer = graph_.values()[access.value].buffer;
    if (!history_.may_conflict(buffer)) return;
    history_.conflicts(buffer, box_of(graph_, what, access, begin, end), access.write,
                       [&](const BoxHistory::Record&, int task) { ready.add(finish_[task], cut_.tasks[task].worker); });
  };
  Ready common;  // readiness of the inputs that every tile reads whole
  for (const Access& access : what.accesses) {
    if (access.axis < 0) collect(access, 0, what.extent, common);
  }
  const bool spread = is_spread(what);
  std::vector<Ready> inputs(static_cast<size_t>(tiles), common);
  std::vector<int> kept(static_cast<size_t>(target_.workers), -1);  // by worker: a tile whose inputs it made
  for (int tile = 0; tile < tiles; ++tile) {
    Ready& ready = inputs[tile];
    for (const Access& access : what.accesses) {
      if (access.axis >= 0) collect(access, choice.bounds[tile], choice.bounds[tile + 1], ready);
    }
    if (spread && ready.worker >= 0 && !ready.second_set && kept[ready.worker] < 0) kept[ready.worker] = tile;
  }
  std::vector<double> available = free_;
  for (int tile = 0; tile < tiles; ++tile) {
    const int64_t begin = choice.bounds[tile];
    const int64_t end = choice.bounds[tile + 1];
    const Ready& ready = inputs[tile];
    const double cost = tile_cost_us(graph_, what, target_, begin, end);
    int best = 0;
    double best_finish = 0;
    // A collective runs on the calling thread; if spread, each tile on a different worker.
    const int workers = std::holds_alternative<CollectiveStage>(what.body) && !spread ? 1 : target_.workers;
    bool first = true;
    for (int worker = 0; worker < workers; ++worker) {
      if (spread && std::count(choice.workers.begin(), choice.workers.end(), worker) != 0) continue;
      if (kept[worker] >= 0 && kept[worker] != tile) continue;
      const double finish = std::max(available[worker], ready.at(worker, target_.wait_us)) + cost;
      // Among workers that finish at the same time take the one idle longest: times are estimates, and that one is
      // surest to be free.
      const bool idler = finish < best_finish + 1e-9 && available[worker] < available[best] - 1e-9;
      if (first || finish < best_finish - 1e-9 || idler) best = worker, best_finish = finish;
      first = false;
    }
    available[best] = best_finish;
    choice.workers.push_back(best);
    choice.finish.push_back(best_finish);
    choice.cost_us.push_back(cost);
    choice.end = std::max(choice.end, best_finish);
  }
  return choice;
}

Choice Cutter::replicate(int stage) {
  const Stage& what = stages_[stage];
  Ready ready;
  for (const Access& access : what.accesses) {
    const int buffer = graph_.values()[access.value].buffer;
    if (!history_.may_conflict(buffer) || access.write) continue;
    history_.conflicts(buffer, box_of(graph_, what, access, 0, what.extent), false,
                       [&](const BoxHistory::Record&, int task) { ready.add(finish_[task], cut_.tasks[task].worker); });
  }
  Choice choice;
  choice.replicas = true;
  choice.bounds = {0, what.extent};
  const double cost = tile_cost_us(graph_, what, target_, 0, what.extent);
  for (int worker = 0; worker < target_.workers; ++worker) {
    choice.workers.push_back(worker);
    choice.cost_us.push_back(cost);
    choice.finish.push_back(std::max(free_[worker], ready.at(worker, target_.wait_us)) + cost);
    choice.end = std::max(choice.end, choice.finish.back());
  }
  return choice;
}

// Whether a later stage reads all of this stage's output in every tile, so that its tiles would wait for each other.
bool Cutter::handed_around(int stage) const {
  for (const Access& write : stages_[stage].accesses) {
    if (!write.write) continue;
    const int buffer = graph_.values()[write.value].buffer;
    for (size_t later = stage + 1; later < stages_.size(); ++later) {
      for (const Access& access : stages_[later].accesses) {
        if (!access.write && access.axis < 0 && graph_.values()[access.value].buffer == buffer) return true;
      }
    }
  }
  return false;
}

Choice Cutter::choose(int stage) {
  if (groups_.is_replicated(stage)) return replicate(stage);
  Choice best;
  bool first = true;
  for (Bounds& bounds : candidate_cuts(graph_, stages_[stage], target_, history_, bounds_)) {
    if (bounds.size() > 2 && tiles_conflict(graph_, stages_[stage], bounds)) bounds = {0, stages_[stage].extent};
    Choice choice = cut_at(stage, std::move(bounds));
    if (first || choice.end < best.end - 1e-9) best = std::move(choice);
    first = false;
  }
  if (groups_.may_replicate(stage)) {
    Choice replicas = replicate(stage);
    if (replicas.end <= best.end + (handed_around(stage) ? target_.wait_us : 0)) best = std::move(replicas);
  }
  groups_.choose(stage, best.replicas);
  return best;
}

void Cutter::commit(int stage, const Choice& choice) {
  std::vector<int> indices;
  bounds_[stage] = choice.bounds;
  for (size_t tile = 0; tile < choice.workers.size(); ++tile) {
    Task task;
    task.stage = stage;
    task.begin = choice.replicas ? 0 : choice.bounds[tile];
    task.end = choice.replicas ? stages_[stage].extent : choice.bounds[tile + 1];
    task.worker = choice.workers[tile];
    task.replica = choice.replicas;
    task.cost_us = choice.cost_us[tile];
    const int index = static_cast<int>(cut_.tasks.size());
    indices.push_back(index);
    cut_.queues[task.worker].tasks.push_back(index);
    free_[task.worker] = std::max(free_[task.worker], choice.finish[tile]);
    finish_.push_back(choice.finish[tile]);
    cut_.tasks.push_back(std::move(task));
  }
  if (choice.replicas) {
    for (const Access& access : stages_[stage].accesses) {
      const int buffer = graph_.values()[access.value].buffer;
      if (access.write) cut_.own[buffer] = true, history_.set_own(buffer);
    }
  }
  history_.add(stage, indices, cut_.tasks);
}

}  // namespace

Cut cut_stages(const Graph& graph, const std::vector<Stage>& stages, const Target& target) {
  return Cutter(graph, stages, target).run();
}

}  // namespace ark::compiler
