// Pairs each replica with the product task after it, and moves waits and signals so that the pair acts as one task.
// See prologue_fusion.hpp.
#include "compiler/passes/prologue_fusion.hpp"
#include "compiler/graph/stage_queries.hpp"

#include <algorithm>
#include <utility>
#include <variant>

namespace ark::compiler {

namespace {

// A program that can fail stays separate: a failure report would name the second half.
bool may_fail(const RowProgram& program) {
  using Kind = RowProgram::Instruction::Kind;
  return std::any_of(program.code.begin(), program.code.end(), [](const RowProgram::Instruction& one) {
    return (one.kind == Kind::load || one.kind == Kind::store) && one.through.size != 0;
  });
}

bool may_begin(const Graph& graph, const Stage& first, const Stage& then) {
  const auto* rows = std::get_if<RowProgram>(&first.body);
  if (rows == nullptr ? !std::holds_alternative<CombineStage>(first.body) : may_fail(*rows)) return false;
  const int read = few_rows_of(then);
  return read >= 0 && first.tail.empty() &&
         std::any_of(first.accesses.begin(), first.accesses.end(), [&](const Access& access) {
           return access.write && graph.values()[access.value].buffer == graph.values()[read].buffer;
         });
}

bool touches(const Graph& graph, const Stage& stage, int buffer, bool write) {
  return std::any_of(stage.accesses.begin(), stage.accesses.end(), [&](const Access& access) {
    return access.write == write && graph.values()[access.value].buffer == buffer;
  });
}

}  // namespace

void fuse_prologues(Plan& plan) {
  for (const Queue& queue : plan.queues) {
    for (size_t place = 1; place < queue.tasks.size(); ++place) {
      Task& first = plan.tasks[queue.tasks[place - 1]];
      Task& then = plan.tasks[queue.tasks[place]];
      if (!first.replica || then.replica || !may_begin(plan.graph, plan.stages[first.stage], plan.stages[then.stage]))
        continue;
      if (std::any_of(then.waits.begin(), then.waits.end(), [&](int event) { return plan.events[event].packets; }))
        continue;  // it polls the packets itself
      // Otherwise the first half's signals would come after waits that may depend on them: a deadlock.
      if (!first.signals.empty() && !(then.waits.empty() && then.carried.empty())) continue;
      const auto move = [](std::vector<int>& from, std::vector<int>& to) {
        for (const int event : from)
          if (std::find(to.begin(), to.end(), event) == to.end()) to.push_back(event);
        from.clear();
      };
      const auto both = [&](int event) {
        return std::find(then.signals.begin(), then.signals.end(), event) != then.signals.end();
      };
      if (std::any_of(first.signals.begin(), first.signals.end(), both)) continue;
      move(then.waits, first.waits);
      move(then.carried, first.carried);
      move(first.signals, then.signals);
      then.head = queue.tasks[place - 1];
    }
  }
}

const std::vector<int>& waits_of(const Plan& plan, int task) {
  const int head = plan.tasks[task].head;
  return plan.tasks[head >= 0 ? head : task].waits;
}

Queue in_one_go(const Plan& plan, const Queue& queue) {
  Queue all;
  std::vector<int> whole(plan.tasks.size(), -1);  // by first half: its task
  for (const int task : queue.tasks) {
    if (const int head = plan.tasks[task].head; head >= 0) {
      whole[head] = task;
      all.tasks.pop_back();
    }
    all.tasks.push_back(task);
  }
  for (Load load : queue.loads) {
    if (whole[load.task] >= 0) load.task = whole[load.task];
    all.loads.push_back(load);
  }
  return all;
}

int head_stage(const Plan& plan, int stage) {
  int first = -1;
  for (const Task& task : plan.tasks) {
    if (task.stage != stage) continue;
    const int mine = task.head < 0 ? -1 : plan.tasks[task.head].stage;
    if (mine < 0 || (first >= 0 && mine != first)) return -1;
    first = mine;
  }
  return first;
}

std::vector<int> kept_in(const Plan& plan, int stage, int64_t most) {
  const int first = head_stage(plan, stage);
  std::vector<int> kept;
  if (first < 0) return kept;
  for (const Access& access : plan.stages[first].accesses) {
    const int buffer = plan.graph.values()[access.value].buffer;
    if (!access.write || touches(plan.graph, plan.stages[first], buffer, false) ||
        std::find(kept.begin(), kept.end(), buffer) != kept.end())
      continue;
    bool alone = true;
    for (int other = 0; other < static_cast<int>(plan.stages.size()); ++other) {
      const bool reads = touches(plan.graph, plan.stages[other], buffer, false);
      const bool writes = touches(plan.graph, plan.stages[other], buffer, true);
      alone = alone && (!reads || other == stage) && (!writes || other == first);
    }
    const int64_t bytes = (plan.graph.buffers()[buffer].bytes + 15) / 16 * 16;
    if (!alone || bytes > most) continue;
    most -= bytes;
    kept.push_back(buffer);
  }
  return kept;
}

}  // namespace ark::compiler
