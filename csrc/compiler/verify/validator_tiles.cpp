// Tiles, replicas and memory of a plan whose structure is sound. See validator.hpp.
#include <algorithm>
#include <map>
#include <string>
#include <variant>

#include "compiler/graph/box.hpp"
#include "compiler/schedule/memory_planner.hpp"
#include "compiler/verify/validator.hpp"
#include "util/error.hpp"

namespace ark::compiler {

namespace {

using std::to_string;

[[noreturn]] void tiles_error(const std::string& what) {
  throw Error(ErrorKind::invalid_argument, what);
}

std::string name_of_stage(const Plan& plan, int stage) {
  const Stage& what = plan.stages[stage];
  return "stage " + to_string(stage) + " '" + (what.name.empty() ? what.kind : what.name) + "'" +
         (what.origin.empty() ? "" : ", " + what.origin);
}

void check_replicas(const Plan& plan, int stage, const std::vector<int>& tasks) {
  std::vector<char> seen(plan.queues.size(), 0);
  for (const int index : tasks) {
    const Task& task = plan.tasks[index];
    if (!task.replica) tiles_error(describe(plan, index) + " is no replica, but its stage has others that are");
    if (!plan.stages[stage].replicable) tiles_error(describe(plan, index) + " replicates what may run only once");
    if (task.begin != 0 || task.end != plan.stages[stage].extent) {
      tiles_error(describe(plan, index) + " is a replica of a part: replicas compute the whole stage");
    }
    if (seen[task.worker]++) tiles_error(describe(plan, index) + " is the second replica on its worker");
  }
}

// Everybody must hear of the end.
void check_stop(const Plan& plan, int stage, const std::vector<int>& tasks) {
  if (!plan.multi_step) tiles_error(name_of_stage(plan, stage) + " ends a loop, in a plan whose steps are launches");
  for (size_t worker = 0; worker < plan.queues.size(); ++worker) {
    const auto here = [&](int index) { return plan.tasks[index].worker == static_cast<int>(worker); };
    if (std::none_of(tasks.begin(), tasks.end(), here)) {
      tiles_error("worker " + to_string(worker) + " does not run " + name_of_stage(plan, stage) +
                  " and would go on where others end");
    }
  }
}

}  // namespace

void check_tiles(const Plan& plan) {
  std::vector<std::vector<int>> tasks_of(plan.stages.size());
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    tasks_of[plan.tasks[index].stage].push_back(static_cast<int>(index));
  }
  for (int stage = 0; stage < static_cast<int>(plan.stages.size()); ++stage) {
    std::vector<int>& tasks = tasks_of[stage];
    const int64_t extent = plan.stages[stage].extent;
    if (std::holds_alternative<StopStage>(plan.stages[stage].body)) check_stop(plan, stage, tasks);
    if (std::any_of(tasks.begin(), tasks.end(), [&](int index) { return plan.tasks[index].replica; })) {
      check_replicas(plan, stage, tasks);
      continue;
    }
    std::sort(tasks.begin(), tasks.end(), [&](int a, int b) { return plan.tasks[a].begin < plan.tasks[b].begin; });
    int64_t covered = 0;
    for (const int index : tasks) {
      const Task& task = plan.tasks[index];
      if (task.begin < covered) tiles_error(describe(plan, index) + " repeats what another tile of its stage does");
      if (task.begin > covered) {
        tiles_error(describe(plan, index) + " leaves a gap: nobody runs [" + to_string(covered) + ", " +
                    to_string(task.begin) + ") of its stage");
      }
      covered = task.end;
    }
    if (covered != extent) {
      tiles_error("nobody runs [" + to_string(covered) + ", " + to_string(extent) + ") of " +
                  name_of_stage(plan, stage));
    }
  }
}

void check_placements(const Plan& plan) {
  const std::vector<Buffer>& buffers = plan.graph.buffers();
  if (plan.placements.size() != buffers.size()) {
    tiles_error("there are " + to_string(plan.placements.size()) + " placements for " + to_string(buffers.size()) +
                " buffers");
  }
  for (size_t buffer = 0; buffer < buffers.size(); ++buffer) {
    const Placement& placement = plan.placements[buffer];
    if (const Push& pushed = placement.pushed; pushed.ranks > 0) {
      const int64_t bytes = 2 * buffers[buffer].bytes;
      if (!placement.packets || placement.own || placement.offset != -1 || plan.multi_step)
        tiles_error("buffer " + to_string(buffer) + " is pushed by ranks, but is no packets, or has a place here too");
      if (bytes > pushed.apart || pushed.place + pushed.ranks * pushed.apart > pushed.half)
        tiles_error("buffer " + to_string(buffer) + " is pushed by ranks beyond its place");
      continue;
    }
    if (placement.offset == -1 && !placement.own && !placement.packets) continue;
    const std::string name = "buffer " + to_string(buffer);
    if (buffers[buffer].kind != Buffer::Kind::temporary) {
      tiles_error(name + " has a place in the arena but is no temporary");
    }
    if (placement.packets && placement.own) tiles_error(name + " is packets to others and each worker's own");
    const int64_t arena = placement.own ? plan.own_bytes : plan.arena_bytes;
    if (placement.offset < 0 || placement.offset % placement_alignment != 0 ||
        placement.offset + placed_bytes(buffers[buffer], placement) > arena) {
      tiles_error(name + " lies at " + to_string(placement.offset) + " with " +
                  to_string(placed_bytes(buffers[buffer], placement)) +
                  " bytes: not aligned, or outside the arena of " + to_string(arena) + " bytes");
    }
  }
  std::vector<int> writer(buffers.size(), -1);  // of packets: the stage
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    const Task& task = plan.tasks[index];
    for (const Access& access : plan.stages[task.stage].accesses) {
      const Value& value = plan.graph.values()[access.value];
      const Buffer& buffer = buffers[value.buffer];
      const Placement& placement = plan.placements[value.buffer];
      const auto name = [&] {
        return describe(plan, static_cast<int>(index)) + (access.write ? " writes" : " reads") + " value " +
               to_string(access.value) + " in buffer " + to_string(value.buffer);
      };
      if (buffer.kind == Buffer::Kind::temporary && placement.offset < 0 && placement.pushed.ranks == 0)
        tiles_error(name() + ", which has no place");
      const Box box = box_of(value);
      if (box.offset < 0 || box.end() > buffer.bytes) {
        tiles_error(name() + " beyond its " + to_string(buffer.bytes) + " bytes");
      }
      if (access.write && placement.packets) {
        int& by = writer[value.buffer];
        if (by >= 0 && by != task.stage) tiles_error(name() + ", whose packets stage " + to_string(by) + " writes too");
        by = task.stage;
      }
      if (access.write && task.replica != placement.own) {
        tiles_error(name() + (task.replica ? ", which all workers share, as one of several replicas"
                                           : ", of which each worker has a copy of its own"));
      }
    }
  }
}

}  // namespace ark::compiler
