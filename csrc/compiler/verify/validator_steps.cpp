// Multi-step plans: two steps in a row without a launch between them. See validator.hpp.
#include <algorithm>
#include <string>

#include "compiler/graph/box.hpp"
#include "compiler/schedule/box_history.hpp"
#include "compiler/verify/validator.hpp"
#include "util/error.hpp"

namespace ark::compiler {

namespace {

using std::to_string;

[[noreturn]] void steps_error(const std::string& what) {
  throw Error(ErrorKind::invalid_argument, what);
}

// A counter knows no steps: were one task's signal of the next step to come before another's of this one, a waiter
// would take the former for the latter.
void check_counters(const Plan& plan, const Order& order) {
  std::vector<std::vector<int>> signallers(plan.events.size());
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    for (const int event : plan.tasks[index].signals) signallers[event].push_back(static_cast<int>(index));
  }
  for (size_t event = 0; event < signallers.size(); ++event) {
    for (const int next : signallers[event]) {
      for (const int before : signallers[event]) {
        if (order.before(before, next, 0, 1)) continue;
        steps_error(describe(plan, next) + " may signal event " + to_string(event) + " for the next step before " +
                    describe(plan, before) + " has for this one");
      }
    }
  }
}

}  // namespace

void check_steps(const Plan& plan) {
  const Order order(plan, 2);
  check_counters(plan, order);
  BoxHistory history(plan.graph, plan.stages, &plan.placements);
  std::vector<std::vector<int>> tasks_of(plan.stages.size());
  for (size_t index = 0; index < plan.tasks.size(); ++index) {
    tasks_of[plan.tasks[index].stage].push_back(static_cast<int>(index));
  }
  for (const int step : {0, 1}) {
    for (int stage = 0; stage < static_cast<int>(plan.stages.size()); ++stage) {
      if (tasks_of[stage].empty()) continue;
      for (const Access& access : plan.stages[stage].accesses) {
        const int buffer = plan.graph.values()[access.value].buffer;
        if (step == 0 || !history.may_conflict(buffer)) continue;
        for (const int task : tasks_of[stage]) {
          const Box box = box_of(plan.graph, plan.stages[stage], access, plan.tasks[task].begin, plan.tasks[task].end);
          history.conflicts(buffer, box, access.write, [&](const BoxHistory::Record& record, int before) {
            if (record.step == 1 || order.before(before, task, 0, 1)) return;
            steps_error(describe(plan, task) + (access.write ? " writes" : " reads") + " value " +
                        to_string(access.value) + " in buffer " + to_string(buffer) +
                        " in the next step while in this one " + describe(plan, before) +
                        " may still touch the same bytes");
          });
        }
      }
      history.add(stage, tasks_of[stage], plan.tasks, step);
    }
  }
}

}  // namespace ark::compiler
