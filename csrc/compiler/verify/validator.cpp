// The structure of a plan: every index within its list, every task on the queue of its worker once, every event with as
// many signals as it counts. See validator.hpp.
#include "compiler/verify/validator.hpp"
#include "compiler/graph/stage_queries.hpp"

#include <algorithm>
#include <string>

#include "util/error.hpp"

namespace ark::compiler {

namespace {

using std::to_string;

[[noreturn]] void structure_error(const std::string& what) {
  throw Error(ErrorKind::invalid_argument, what);
}

void check_target(const Plan& plan) {
  const Target& target = plan.target;
  if (target.workers < 1) structure_error("a plan for " + to_string(target.workers) + " workers cannot run");
  if (plan.queues.size() != static_cast<size_t>(target.workers)) {
    structure_error("there are " + to_string(plan.queues.size()) + " queues for " + to_string(target.workers) +
                    " workers");
  }
  if (target.page_bytes < 1 || target.pages < 1) {
    structure_error("the ring has " + to_string(target.pages) + " pages of " + to_string(target.page_bytes) +
                    " bytes: it needs at least one of one");
  }
  if (target.in_flight < 1 || target.in_flight > target.pages) {
    structure_error("the ring of " + to_string(target.pages) + " pages cannot have " + to_string(target.in_flight) +
                    " in flight");
  }
}

void check_task(const Plan& plan, int index) {
  const Task& task = plan.tasks[index];
  const auto name = [&] { return describe(plan, index); };
  if (task.stage < 0 || task.stage >= static_cast<int>(plan.stages.size())) {
    structure_error(name() + " is of no stage: there are " + to_string(plan.stages.size()));
  }
  const Stage& stage = plan.stages[task.stage];
  if (task.begin < 0 || task.end > stage.extent || task.begin >= task.end) {
    structure_error(name() + " is no part of its stage's extent of " + to_string(stage.extent));
  }
  if (task.begin % stage.grain != 0 || (task.end % stage.grain != 0 && task.end != stage.extent)) {
    structure_error(name() + " is not cut at multiples of its stage's grain of " + to_string(stage.grain));
  }
  if (task.worker < 0 || task.worker >= plan.target.workers) {
    structure_error(name() + " is for a worker that is not there: there are " + to_string(plan.target.workers));
  }
  if (!task.carried.empty() && !plan.multi_step) {
    structure_error(name() + " waits for the step before, in a plan whose steps are launches of their own");
  }
  if (std::holds_alternative<CollectiveStage>(stage.body) &&
      (task.replica || (task.worker != 0 && !is_spread(stage)))) {
    structure_error(name() + " is a collective" +
                    (is_spread(stage) ? ", which is not repeated" : ", which belongs to worker 0"));
  }
  for (const int event : task.carried) {
    if (event >= 0 && event < static_cast<int>(plan.events.size()) && plan.events[event].packets) {
      structure_error(name() + " waits for packets of the step before, which have no counter");
    }
  }
  for (const auto* list : {&task.waits, &task.signals, &task.carried}) {
    const char* verb = list == &task.signals ? " signals event " : " waits for event ";
    for (size_t at = 0; at < list->size(); ++at) {
      const int event = (*list)[at];
      if (event < 0 || event >= static_cast<int>(plan.events.size())) {
        structure_error(name() + verb + to_string(event) + ": there are " + to_string(plan.events.size()) + " events");
      }
      if (std::find(list->begin(), list->begin() + at, event) != list->begin() + at) {
        structure_error(name() + verb + to_string(event) + " twice");
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
        structure_error("the queue of worker " + to_string(worker) + " has a task " + to_string(index) +
                        ": there are " + to_string(plan.tasks.size()));
      }
      if (queue_of[index] >= 0) structure_error(describe(plan, index) + " is queued twice");
      const Stage& stage = plan.stages[plan.tasks[index].stage];
      if (const int node = stage.node; node >= 0 && std::holds_alternative<CollectiveStage>(stage.body)) {
        if (node < collective) {
          structure_error(describe(plan, index) + " is a collective that stands before this one in the graph");
        }
        if (node == collective) {
          structure_error(describe(plan, index) + " is the second tile of a collective on worker " + to_string(worker) +
                          ", where another rank may have the first");
        }
        collective = node;
      }
      queue_of[index] = static_cast<int>(worker);
      if (plan.tasks[index].worker != static_cast<int>(worker)) {
        structure_error(describe(plan, index) + " is in the queue of worker " + to_string(worker));
      }
      if (index < last) {
        structure_error(describe(plan, index) + " is queued behind " + describe(plan, last) +
                        ", though tasks are listed in an order that is valid to execute");
      }
      last = index;
    }
  }
  for (size_t index = 0; index < queue_of.size(); ++index) {
    if (queue_of[index] < 0) structure_error(describe(plan, static_cast<int>(index)) + " is in no queue");
  }
}

void check_events(const Plan& plan) {
  std::vector<int> signals(plan.events.size(), 0);
  std::vector<int> last(plan.events.size(), -1);  // task that signals
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    for (const int event : plan.tasks[index].signals) ++signals[event], last[event] = static_cast<int>(index);
  }
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    for (const int event : plan.tasks[index].waits) {
      if (signals[event] == plan.events[event].threshold && last[event] >= static_cast<int>(index)) {
        structure_error(describe(plan, static_cast<int>(index)) + " waits for event " + to_string(event) + ", which " +
                        describe(plan, last[event]) +
                        " signals: tasks are listed in an order that is valid to execute");
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
    structure_error((waiter >= 0 ? describe(plan, waiter) + " waits for event " : "event ") + to_string(event) +
                    (waiter >= 0 ? ", which" : "") + " counts to " + to_string(plan.events[event].threshold) +
                    " a step but has " + to_string(signals[event]) + " signals" +
                    (last[event] >= 0 ? ", the last by " + describe(plan, last[event]) : ""));
  }
}

}  // namespace

void check_stages(const Plan& plan) {
  const auto values = static_cast<int>(plan.graph.values().size());
  for (size_t index = 0; index < plan.stages.size(); ++index) {
    const Stage& stage = plan.stages[index];
    const std::string name = "stage " + to_string(index) + " '" + (stage.name.empty() ? stage.kind : stage.name) + "'";
    if (stage.extent < 0 || stage.grain < 1) {
      structure_error(name + " has extent " + to_string(stage.extent) + " and grain " + to_string(stage.grain));
    }
    std::vector<Access> accesses = stage.accesses;
    for (const Stage& next : stage.tail) accesses.insert(accesses.end(), next.accesses.begin(), next.accesses.end());
    for (const Access& access : accesses) {
      if (access.value < 0 || access.value >= values || plan.graph.values()[access.value].is_literal()) {
        structure_error(name + " touches value " + to_string(access.value) + ", which is in no buffer");
      }
      const Value& value = plan.graph.values()[access.value];
      if (access.axis >= static_cast<int>(value.shape.size())) {
        structure_error(name + " cuts dimension " + to_string(access.axis) + " of value " + to_string(access.value) +
                        ", which has " + to_string(value.shape.size()));
      }
      if (access.write && plan.graph.buffers()[value.buffer].kind == Buffer::Kind::input &&
          !plan.graph.buffers()[value.buffer].mutated) {
        structure_error(name + " writes value " + to_string(access.value) +
                        ", which lies on an input that is not to change");
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
