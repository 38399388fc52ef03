// Turns a failed step's report into an Error that names stage, tile and remedy. See step_failure.hpp.
#include "compiler/runtime/step_failure.hpp"

#include <algorithm>
#include <string>

#include "compiler/passes/prologue_fusion.hpp"
#include "util/error.hpp"
#include "util/format.hpp"

namespace ark::compiler {

namespace {

std::string describe_task(const Plan& plan, int task) {
  if (task < 0 || task >= static_cast<int>(plan.tasks.size())) return formatted("task {}", task);
  const Task& one = plan.tasks[static_cast<size_t>(task)];
  const Stage& stage = plan.stages[static_cast<size_t>(one.stage)];
  return formatted("task {} ({}, {}, worker {})", task, stage.name, stage.origin, one.worker);
}

}  // namespace

std::string describe_left(const Plan& plan, const StepFailure& failure) {
  std::string sums;  // fused sums that it may have waited for
  const auto add_sums = [&](int task) {
    for (const Access& access :
         plan.stages[static_cast<size_t>(plan.tasks[static_cast<size_t>(task)].stage)].accesses) {
      const auto buffer = static_cast<size_t>(plan.graph.values()[static_cast<size_t>(access.value)].buffer);
      const Push& pushed = plan.placements[buffer].pushed;
      if (access.write || pushed.ranks == 0) continue;
      const Node& node = plan.graph.nodes()[static_cast<size_t>(pushed.node)];
      append(sums, "{} of {} ({})", sums.empty() ? "" : " or", node.op, node.origin);
    }
  };
  if (failure.task >= 0 && failure.task < static_cast<int>(plan.tasks.size())) {
    const int head = plan.tasks[static_cast<size_t>(failure.task)].head;
    for (const int task : {head, failure.task})
      if (task >= 0) add_sums(task);
  }
  return formatted("worker {} left {} without the part of rank {}{}", failure.worker, describe_task(plan, failure.task),
                   failure.value, sums);
}

void raise_step_failure(const Plan& plan, const StepFailure& failure) {
  ErrorContext context;
  context.operation = "compiled region";
  switch (failure.kind) {
    case StepFailure::Kind::index_too_large: {
      const Stage& stage = plan.stages.at(static_cast<size_t>(failure.stage));
      if (stage.kind == "check") {
        const Node& node = plan.graph.nodes().at(static_cast<size_t>(stage.node));
        throw Error(ErrorKind::invalid_argument, formatted("{} ({})", node.text("message"), stage.origin), context);
      }
      if (failure.dimension < 0)
        throw Error(ErrorKind::out_of_range,
                    formatted("offsets hold {} where at most {} may stand in {} ({}): they begin at 0, do not fall, "
                              "and end within the indices",
                              failure.value, failure.limit - 1, stage.name, stage.origin),
                    context);
      throw Error(ErrorKind::out_of_range,
                  formatted("index {} is out of bounds for dimension {} with size {} in {}", failure.value,
                            failure.dimension, failure.limit,
                            stage.indexed.empty() ? formatted("{} ({})", stage.name, stage.origin) : stage.indexed),
                  context);
    }
    case StepFailure::Kind::deadline: {
      std::string whom;
      const bool polled = failure.event < 0;
      const std::vector<int>& waits = waits_of(plan, failure.task);
      const auto meant = [&](int event) {
        const bool one_of = std::find(waits.begin(), waits.end(), event) != waits.end();
        return polled ? one_of && plan.events[static_cast<size_t>(event)].packets : event == failure.event;
      };
      for (size_t i = 0; i < plan.tasks.size() && whom.size() < 300; ++i) {
        const auto& signals = plan.tasks[i].signals;
        if (std::any_of(signals.begin(), signals.end(), meant))
          whom += (whom.empty() ? "" : ", ") + describe_task(plan, static_cast<int>(i));
      }
      const std::string missing =
          polled ? formatted("packets of step {} have not come", failure.limit)
                 : formatted("event {} is at {} and must reach {}", failure.event, failure.value, failure.limit);
      context.remedy = "Raise the limit if the machine is that busy; otherwise please report it with the plan.";
      throw Error(ErrorKind::timeout,
                  formatted("worker {} waited longer than {} ms before {} for {}: {}", failure.worker,
                            failure.timeout.count(), describe_task(plan, failure.task), whom, missing),
                  context);
    }
    case StepFailure::Kind::collective: {
      const Stage& stage = plan.stages.at(static_cast<size_t>(failure.stage));
      throw Error(ErrorKind::system, formatted("a collective failed in {} ({})", stage.name, stage.origin), context);
    }
    case StepFailure::Kind::peer:
      context.peer = static_cast<int>(failure.value);
      throw Error(ErrorKind::peer_lost, describe_left(plan, failure), context);
    case StepFailure::Kind::aborted: break;
  }
  throw Error(ErrorKind::aborted, "a compiled region was aborted", context);
}

}  // namespace ark::compiler
