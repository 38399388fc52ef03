// Checks the lists of loads: in queue order, in pages that the ring can hold, covering exactly the parameters that
// tasks read. See validator.hpp.
#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "compiler/graph/box.hpp"
#include "compiler/schedule/prefetch.hpp"
#include "compiler/verify/plan_error.hpp"
#include "compiler/verify/validator.hpp"

namespace ark::compiler {

namespace {

// The loads [first, last) of a queue that belong to one task and one value.
struct LoadRun {
  int value = -1;
  size_t first = 0, last = 0;
};

std::string name_of_load(const Plan& plan, int worker, size_t index) {
  const Load& load = plan.queues[worker].loads[index];
  std::string text = formatted("load {} of worker {}", index, worker);
  if (load.task >= 0 && load.task < static_cast<int>(plan.tasks.size())) text += " for " + describe(plan, load.task);
  return text;
}

void check_load_run(const Plan& plan, int worker, const LoadRun& run) {
  const std::vector<Load>& loads = plan.queues[worker].loads;
  const auto name = [&](size_t index) { return name_of_load(plan, worker, index); };
  if (run.value < 0 || run.value >= static_cast<int>(plan.graph.values().size()) ||
      plan.graph.values()[run.value].is_literal()) {
    plan_error("{} is of value {}, which is in no buffer", name(run.first), run.value);
  }
  const Buffer& buffer = plan.graph.buffer_of(run.value);
  if (!buffer.parameter || buffer.mutated || buffer.kind != Buffer::Kind::input) {
    plan_error("{} is of value {}, which is no parameter: only what never changes may be loaded ahead", name(run.first),
               run.value);
  }
  const Task& task = plan.tasks[loads[run.first].task];
  const Stage& stage = plan.stages[task.stage];
  const Box box = loaded_box(plan.graph, stage, task, run.value);
  int64_t bytes = 0;
  for (size_t index = run.first; index < run.last; ++index) {
    const Load& load = loads[index];
    if (load.rows < 1 || load.bytes < 1 || load.rows * load.bytes > plan.target.page_bytes) {
      plan_error("{} has {} x {} bytes: a page of the ring holds {}", name(index), load.rows, load.bytes,
                 plan.target.page_bytes);
    }
    Box piece{load.offset, load.bytes, 0, true, {}};
    if (load.rows > 1) {
      piece.depth = 1;
      piece.dimensions[0] = {load.stride, load.rows};
    }
    if (!covers(box, piece)) {
      plan_error("{} is of bytes that the task does not read", name(index));
    }
    if (index > run.first && load.offset <= loads[index - 1].offset) {
      plan_error("{} comes behind one of a later part: pages of a value come in order, each once", name(index));
    }
    bytes += load.rows * load.bytes;
  }
  if (bytes != box.bytes()) {
    plan_error("{} and those behind bring {} bytes of value {}: not what the task reads", name(run.first), bytes,
               run.value);
  }
}

// Checks that the loads cover what the task reads.
void check_loads_of_task(const Plan& plan, int worker, int index, const std::vector<LoadRun>& runs) {
  const Task& task = plan.tasks[index];
  const Stage& stage = plan.stages[task.stage];
  if (static_cast<int>(runs.size()) > plan.target.pages) {
    plan_error("{} reads {} parameters side by side, more than the ring has pages ({})", describe(plan, index),
               runs.size(), plan.target.pages);
  }
  for (const LoadRun& run : runs) check_load_run(plan, worker, run);
  for (const Access& access : stage.accesses) {
    if (!loaded_ahead(plan.graph, stage, access)) continue;
    const Box read = box_of(plan.graph, stage, access, task.begin, task.end);
    const Box box = loaded_box(plan.graph, stage, task, access.value);
    if (!read.empty() && (read.offset < box.offset || read.end() > box.end()))
      plan_error("{} reads more of parameter value {} than is loaded", describe(plan, index), access.value);
    const int buffer = plan.graph.values()[access.value].buffer;
    const bool there = std::any_of(runs.begin(), runs.end(), [&](const LoadRun& run) {
      if (run.value == access.value) return true;
      if (plan.graph.values()[run.value].buffer != buffer) return false;
      return covers(loaded_box(plan.graph, stage, task, run.value), box);
    });
    if (!there && !box.empty()) {
      plan_error("{} reads parameter value {}, which its worker's loader does not bring", describe(plan, index),
                 access.value);
    }
  }
}

// Checks the prefetches: loads of each queue in their order, and each page once.
void check_prefetches(const Plan& plan) {
  if (plan.prefetches.empty()) return;
  if (plan.prefetches.size() != plan.queues.size())
    plan_error("there are prefetches for {} of {} queues", plan.prefetches.size(), plan.queues.size());
  const auto what = [](const Load& load) {
    return std::tie(load.value, load.offset, load.bytes, load.rows, load.stride);
  };
  const auto same = [&](const Load& a, const Load& b) { return a.task == b.task && what(a) == what(b); };
  std::vector<Load> read, asked;
  for (size_t worker = 0; worker < plan.queues.size(); ++worker) {
    const std::vector<Load>& loads = plan.queues[worker].loads;
    read.insert(read.end(), loads.begin(), loads.end());
    auto next = loads.begin();
    for (const Load& load : plan.prefetches[worker]) {
      next = std::find_if(next, loads.end(), [&](const Load& one) { return same(one, load); });
      if (next == loads.end())
        plan_error("the load of {} bytes of value {} that worker {} asks for ahead is not the next that its tasks read",
                   load.bytes, load.value, worker);
      ++next;
      asked.push_back(load);
    }
  }
  const auto less = [&](const Load& a, const Load& b) { return what(a) < what(b); };
  std::sort(asked.begin(), asked.end(), less);
  for (const Load& load : read)
    if (!std::binary_search(asked.begin(), asked.end(), load, less))
      plan_error("{} reads {} bytes of value {}, which no worker asks for ahead", describe(plan, load.task), load.bytes,
                 load.value);
}

}  // namespace

void check_loads(const Plan& plan) {
  for (int worker = 0; worker < static_cast<int>(plan.queues.size()); ++worker) {
    const Queue& queue = plan.queues[worker];
    size_t next = 0;
    for (const int index : queue.tasks) {
      std::vector<LoadRun> runs;
      for (; next < queue.loads.size() && queue.loads[next].task == index; ++next) {
        if (runs.empty() || runs.back().value != queue.loads[next].value) {
          runs.push_back({queue.loads[next].value, next, next});
        }
        runs.back().last = next + 1;
      }
      check_loads_of_task(plan, worker, index, runs);
    }
    if (next < queue.loads.size()) {
      plan_error("{} is not in the order of that worker's queue", name_of_load(plan, worker, next));
    }
  }
  check_prefetches(plan);
}

}  // namespace ark::compiler
