// Checks a plan's parts: indices in range, each task once in its worker's queue, as many signals per event as its
// threshold; tiles, replicas and placements; tails; and tasks that are run as one. See validator.hpp.
#include "compiler/verify/validator.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "compiler/graph/box.hpp"
#include "compiler/graph/stage_queries.hpp"
#include "compiler/schedule/memory_planner.hpp"
#include "compiler/verify/plan_error.hpp"

namespace ark::compiler {

namespace {

void check_target(const Plan& plan) {
  const Target& target = plan.target;
  if (target.workers < 1) plan_error("a plan for {} workers cannot run", target.workers);
  if (plan.queues.size() != static_cast<size_t>(target.workers)) {
    plan_error("there are {} queues for {} workers", plan.queues.size(), target.workers);
  }
  if (target.page_bytes < 1 || target.pages < 1) {
    plan_error("the ring has {} pages of {} bytes: it needs at least one of one", target.pages, target.page_bytes);
  }
  if (target.in_flight < 1 || target.in_flight > target.pages) {
    plan_error("the ring of {} pages cannot have {} in flight", target.pages, target.in_flight);
  }
}

void check_task(const Plan& plan, int index) {
  const Task& task = plan.tasks[index];
  const auto name = [&] { return describe(plan, index); };
  if (task.stage < 0 || task.stage >= static_cast<int>(plan.stages.size())) {
    plan_error("{} is of no stage: there are {}", name(), plan.stages.size());
  }
  const Stage& stage = plan.stages[task.stage];
  if (task.begin < 0 || task.end > stage.extent || task.begin >= task.end) {
    plan_error("{} is no part of its stage's extent of {}", name(), stage.extent);
  }
  if (task.begin % stage.grain != 0 || (task.end % stage.grain != 0 && task.end != stage.extent)) {
    plan_error("{} is not cut at multiples of its stage's grain of {}", name(), stage.grain);
  }
  if (task.worker < 0 || task.worker >= plan.target.workers) {
    plan_error("{} is for a worker that is not there: there are {}", name(), plan.target.workers);
  }
  if (!task.carried.empty() && !plan.multi_step) {
    plan_error("{} waits for the step before, in a plan whose steps are launches of their own", name());
  }
  if (std::holds_alternative<CollectiveStage>(stage.body) &&
      (task.replica || (task.worker != 0 && !is_spread(stage)))) {
    plan_error("{} is a collective{}", name(),
               is_spread(stage) ? ", which is not repeated" : ", which belongs to worker 0");
  }
  for (const int event : task.carried) {
    if (event >= 0 && event < static_cast<int>(plan.events.size()) && plan.events[event].packets) {
      plan_error("{} waits for packets of the step before, which have no counter", name());
    }
  }
  for (const auto* list : {&task.waits, &task.signals, &task.carried}) {
    const char* verb = list == &task.signals ? " signals event " : " waits for event ";
    for (size_t at = 0; at < list->size(); ++at) {
      const int event = (*list)[at];
      if (event < 0 || event >= static_cast<int>(plan.events.size())) {
        plan_error("{}{}{}: there are {} events", name(), verb, event, plan.events.size());
      }
      if (std::find(list->begin(), list->begin() + at, event) != list->begin() + at) {
        plan_error("{}{}{} twice", name(), verb, event);
      }
    }
  }
}

void check_queues(const Plan& plan) {
  std::vector<int> queue_of(plan.tasks.size(), -1);
  for (size_t worker = 0; worker < plan.queues.size(); ++worker) {
    int last = -1;
    int collective = -1;  // node of the last one
    for (const int index : plan.queues[worker].tasks) {
      if (index < 0 || index >= static_cast<int>(plan.tasks.size())) {
        plan_error("the queue of worker {} has a task {}: there are {}", worker, index, plan.tasks.size());
      }
      if (queue_of[index] >= 0) plan_error("{} is queued twice", describe(plan, index));
      const Stage& stage = plan.stages[plan.tasks[index].stage];
      if (const int node = stage.node; node >= 0 && std::holds_alternative<CollectiveStage>(stage.body)) {
        if (node < collective) {
          plan_error("{} is a collective that stands before this one in the graph", describe(plan, index));
        }
        if (node == collective) {
          plan_error("{} is the second tile of a collective on worker {}, where another rank may have the first",
                     describe(plan, index), worker);
        }
        collective = node;
      }
      queue_of[index] = static_cast<int>(worker);
      if (plan.tasks[index].worker != static_cast<int>(worker)) {
        plan_error("{} is in the queue of worker {}", describe(plan, index), worker);
      }
      if (index < last) {
        plan_error("{} is queued behind {}, though tasks are listed in an order that is valid to execute",
                   describe(plan, index), describe(plan, last));
      }
      last = index;
    }
  }
  for (size_t index = 0; index < queue_of.size(); ++index) {
    if (queue_of[index] < 0) plan_error("{} is in no queue", describe(plan, static_cast<int>(index)));
  }
}

void check_events(const Plan& plan) {
  std::vector<int> signals(plan.events.size(), 0);
  std::vector<int> last(plan.events.size(), -1);  // the last task that signals
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    for (const int event : plan.tasks[index].signals) ++signals[event], last[event] = static_cast<int>(index);
  }
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    for (const int event : plan.tasks[index].waits) {
      if (signals[event] == plan.events[event].threshold && last[event] >= static_cast<int>(index)) {
        plan_error("{} waits for event {}, which {} signals: tasks are listed in an order that is valid to execute",
                   describe(plan, static_cast<int>(index)), event, describe(plan, last[event]));
      }
    }
  }
  for (size_t event = 0; event < plan.events.size(); ++event) {
    if (plan.events[event].threshold == signals[event] && signals[event] > 0) continue;
    int waiter = -1;
    for (size_t index = 0; index < plan.tasks.size() && waiter < 0; ++index) {
      const Task& task = plan.tasks[index];
      for (const auto* list : {&task.waits, &task.carried}) {
        if (std::find(list->begin(), list->end(), static_cast<int>(event)) != list->end()) {
          waiter = static_cast<int>(index);
        }
      }
    }
    plan_error("{}{}{} counts to {} a step but has {} signals{}",
               waiter >= 0 ? describe(plan, waiter) + " waits for event " : "event ", event,
               waiter >= 0 ? ", which" : "", plan.events[event].threshold, signals[event],
               last[event] >= 0 ? ", the last by " + describe(plan, last[event]) : "");
  }
}

std::string name_of_stage(const Plan& plan, int stage) {
  const Stage& what = plan.stages[stage];
  return formatted("stage {} '{}'{}", stage, what.name.empty() ? what.kind : what.name,
                   what.origin.empty() ? "" : ", " + what.origin);
}

void check_replicas(const Plan& plan, int stage, const std::vector<int>& tasks) {
  std::vector<char> seen(plan.queues.size(), 0);
  for (const int index : tasks) {
    const Task& task = plan.tasks[index];
    if (!task.replica) plan_error("{} is no replica, but its stage has others that are", describe(plan, index));
    if (!plan.stages[stage].replicable) plan_error("{} replicates what may run only once", describe(plan, index));
    if (task.begin != 0 || task.end != plan.stages[stage].extent) {
      plan_error("{} is a replica of a part: replicas compute the whole stage", describe(plan, index));
    }
    if (seen[task.worker]++) plan_error("{} is the second replica on its worker", describe(plan, index));
  }
}

// Every worker must learn of the end.
void check_stop(const Plan& plan, int stage, const std::vector<int>& tasks) {
  if (!plan.multi_step) plan_error("{} ends a loop, in a plan whose steps are launches", name_of_stage(plan, stage));
  for (size_t worker = 0; worker < plan.queues.size(); ++worker) {
    const auto here = [&](int index) { return plan.tasks[index].worker == static_cast<int>(worker); };
    if (std::none_of(tasks.begin(), tasks.end(), here)) {
      plan_error("worker {} does not run {} and would go on where others end", worker, name_of_stage(plan, stage));
    }
  }
}

// Checks Stage::tail. Nothing but the stage's accesses orders what a tail touches.
class TailChecker {
 public:
  TailChecker(const Plan& plan, const Stage& stage) : plan_(plan), stage_(stage) {
    for (const Stage& next : stage.tail)
      for (const Access& access : next.accesses)
        if (access.write) later_.push_back(access);
  }

  // Checks the task at `index` as one tile of its stage.
  void check(int index) const {
    const Task& task = plan_.tasks[index];
    const auto name = [&] { return describe(plan_, index); };
    std::vector<Access> made;  // writes so far by the task itself
    for (const Access& access : stage_.accesses)
      if (access.write && !is_one_of(later_, access)) made.push_back(access);
    for (const Stage& next : stage_.tail) {
      if (next.extent != stage_.extent || !next.tail.empty())
        plan_error("{} goes on with {}, whose tiles are not its own", name(), next.name);
      for (const Access& access : next.accesses) {
        const auto place = [&] { return formatted("value {} in {}", access.value, next.name); };
        if (access.write) {
          if (!is_one_of(stage_.accesses, access))
            plan_error("{} writes {}, which its stage does not declare", name(), place());
          continue;
        }
        const Box box = box_of(plan_.graph, stage_, access, task.begin, task.end);
        bool own = false;
        for (const Access& one : stage_.accesses) {
          if (!one.write || buffer_of(one) != buffer_of(access) || !overlap(whole(one), whole(access))) continue;
          own = true;
          const bool changed = is_one_of(next.accesses, one);  // in place, by the same stage
          if ((!changed && !is_one_of(made, one)) ||
              !covers(box_of(plan_.graph, stage_, one, task.begin, task.end), box))
            plan_error("{} reads {}, of which another tile of its stage writes a part", name(), place());
        }
        if (!own && !is_one_of(stage_.accesses, access))
          plan_error("{} reads {}, which its stage does not declare", name(), place());
      }
      for (const Access& access : next.accesses)
        if (access.write) made.push_back(access);
    }
  }

 private:
  static bool is_one_of(const std::vector<Access>& list, const Access& access) {
    return std::any_of(list.begin(), list.end(), [&](const Access& one) {
      return one.value == access.value && one.axis == access.axis && one.write == access.write;
    });
  }
  int buffer_of(const Access& access) const { return plan_.graph.values()[access.value].buffer; }
  Box whole(const Access& access) const { return box_of(plan_.graph.values()[access.value]); }

  const Plan& plan_;
  const Stage& stage_;
  std::vector<Access> later_;  // writes of the tail's stages
};

}  // namespace

void check_stages(const Plan& plan) {
  const auto values = static_cast<int>(plan.graph.values().size());
  for (size_t index = 0; index < plan.stages.size(); ++index) {
    const Stage& stage = plan.stages[index];
    const std::string name = formatted("stage {} '{}'", index, stage.name.empty() ? stage.kind : stage.name);
    if (stage.extent < 0 || stage.grain < 1) {
      plan_error("{} has extent {} and grain {}", name, stage.extent, stage.grain);
    }
    std::vector<Access> accesses = stage.accesses;
    for (const Stage& next : stage.tail) accesses.insert(accesses.end(), next.accesses.begin(), next.accesses.end());
    for (const Access& access : accesses) {
      if (access.value < 0 || access.value >= values || plan.graph.values()[access.value].is_literal()) {
        plan_error("{} touches value {}, which is in no buffer", name, access.value);
      }
      const Value& value = plan.graph.values()[access.value];
      if (access.axis >= static_cast<int>(value.shape.size())) {
        plan_error("{} cuts dimension {} of value {}, which has {}", name, access.axis, access.value,
                   value.shape.size());
      }
      if (access.write && plan.graph.buffers()[value.buffer].kind == Buffer::Kind::input &&
          !plan.graph.buffers()[value.buffer].mutated) {
        plan_error("{} writes value {}, which lies on an input that is not to change", name, access.value);
      }
    }
  }
}

void check_structure(const Plan& plan) {
  check_target(plan);
  check_stages(plan);
  for (size_t index = 0; index < plan.tasks.size(); ++index) check_task(plan, static_cast<int>(index));
  check_queues(plan);
  check_events(plan);
}

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
      if (task.begin < covered) plan_error("{} repeats what another tile of its stage does", describe(plan, index));
      if (task.begin > covered) {
        plan_error("{} leaves a gap: nobody runs [{}, {}) of its stage", describe(plan, index), covered, task.begin);
      }
      covered = task.end;
    }
    if (covered != extent) {
      plan_error("nobody runs [{}, {}) of {}", covered, extent, name_of_stage(plan, stage));
    }
  }
}

void check_placements(const Plan& plan) {
  const std::vector<Buffer>& buffers = plan.graph.buffers();
  if (plan.placements.size() != buffers.size()) {
    plan_error("there are {} placements for {} buffers", plan.placements.size(), buffers.size());
  }
  for (size_t buffer = 0; buffer < buffers.size(); ++buffer) {
    const Placement& placement = plan.placements[buffer];
    if (const Push& pushed = placement.pushed; pushed.ranks > 0) {
      const int64_t bytes = 2 * buffers[buffer].bytes;
      if (!placement.packets || placement.own || placement.offset != -1 || plan.multi_step)
        plan_error("buffer {} is pushed by ranks, but is no packets, or has a place here too", buffer);
      if (bytes > pushed.apart || pushed.place + pushed.ranks * pushed.apart > pushed.half)
        plan_error("buffer {} is pushed by ranks beyond its place", buffer);
      continue;
    }
    if (placement.offset == -1 && !placement.own && !placement.packets) continue;
    const std::string name = formatted("buffer {}", buffer);
    if (buffers[buffer].kind != Buffer::Kind::temporary) {
      plan_error("{} has a place in the arena but is no temporary", name);
    }
    if (placement.packets && placement.own) plan_error("{} is packets to others and each worker's own", name);
    const int64_t arena = placement.own ? plan.own_bytes : plan.arena_bytes;
    if (placement.offset < 0 || placement.offset % placement_alignment != 0 ||
        placement.offset + placed_bytes(buffers[buffer], placement) > arena) {
      plan_error("{} lies at {} with {} bytes: not aligned, or outside the arena of {} bytes", name, placement.offset,
                 placed_bytes(buffers[buffer], placement), arena);
    }
  }
  std::vector<int> writer(buffers.size(), -1);  // of packets: the stage that writes them
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    const Task& task = plan.tasks[index];
    for (const Access& access : plan.stages[task.stage].accesses) {
      const Value& value = plan.graph.values()[access.value];
      const Buffer& buffer = buffers[value.buffer];
      const Placement& placement = plan.placements[value.buffer];
      const auto name = [&] {
        return formatted("{} {} value {} in buffer {}", describe(plan, static_cast<int>(index)),
                         access.write ? "writes" : "reads", access.value, value.buffer);
      };
      if (buffer.kind == Buffer::Kind::temporary && placement.offset < 0 && placement.pushed.ranks == 0)
        plan_error("{}, which has no place", name());
      const Box box = box_of(value);
      if (box.offset < 0 || box.end() > buffer.bytes) {
        plan_error("{} beyond its {} bytes", name(), buffer.bytes);
      }
      if (access.write && placement.packets) {
        int& by = writer[value.buffer];
        if (by >= 0 && by != task.stage) plan_error("{}, whose packets stage {} writes too", name(), by);
        by = task.stage;
      }
      if (access.write && task.replica != placement.own) {
        plan_error("{}{}", name(),
                   task.replica ? ", which all workers share, as one of several replicas"
                                : ", of which each worker has a copy of its own");
      }
    }
  }
}

void check_tails(const Plan& plan) {
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    const Stage& stage = plan.stages[plan.tasks[index].stage];
    if (!stage.tail.empty()) TailChecker(plan, stage).check(static_cast<int>(index));
  }
}

// Checks Task::head. The other checks treat the two halves as separate tasks; here, no wait or signal may be left
// between them.
void check_heads(const Plan& plan) {
  for (const Queue& queue : plan.queues) {
    int before = -1;
    for (const int index : queue.tasks) {
      const Task& task = plan.tasks[index];
      const int last = std::exchange(before, index);
      if (task.head < 0) continue;
      const auto name = [&] { return describe(plan, index) + " begins with "; };
      if (task.head != last) plan_error("{}a task that is not the one before it in its queue", name());
      const Task& head = plan.tasks[last];
      if (head.head >= 0) plan_error("{}{}, which begins with another itself", name(), describe(plan, last));
      if (task.replica || !head.replica)
        plan_error("{}{}, which is not for its worker alone", name(), describe(plan, last));
      if (!task.waits.empty() || !task.carried.empty())
        plan_error("{}{}, and waits behind it for an event that nobody looks at there", name(), describe(plan, last));
      if (!head.signals.empty())
        plan_error("{}{}, which signals an event that nobody bumps there", name(), describe(plan, last));
    }
  }
}

void validate(const Plan& plan) {
  check_structure(plan);
  check_tiles(plan);
  check_tails(plan);
  check_heads(plan);
  check_placements(plan);
  check_loads(plan);
  check_order(plan);
  if (plan.multi_step) check_steps(plan);
}

}  // namespace ark::compiler
