// The compiler's passes in the order in which they run: from a graph to a plan that is verified and ready to be
// emitted.
//
// The table in pipeline.cpp is the pipeline: nothing runs that does not stand there, and nothing behind `verify`.
// Passes of the first phase rewrite stages, those of the second schedule them; each leaves what its row says.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// What passes work on.
struct Compilation {
  Plan plan;                  // its graph and stages first, then tasks, events, memory
  std::vector<bool> own;      // by buffer: one copy a worker; from the schedule on
  std::vector<bool> packets;  // by buffer: travels as packets; from choose_packets on
};

struct Pass {
  enum class Phase : uint8_t { stages, schedule };
  enum class On : uint8_t { all, gpu };
  enum class Steps : uint8_t { any, one, several };  // in a launch

  const char* name;
  Phase phase;
  On on;
  Steps steps;
  void (*run)(Compilation&);
  const char* leaves;  // what holds afterwards, for people

  bool takes(const Plan& plan) const;
};

std::span<const Pass> pipeline();

// Called after each pass that ran; its number counts the table's rows from 1.
using PassObserver = std::function<void(const Pass& pass, int number, const Compilation& now)>;

// Throws Error(invalid_argument): a graph that is not valid, a target without workers or pages.
Plan make_plan(Graph graph, const Target& target, bool multi_step = false, const PassObserver& observer = nullptr);
// The same from stages made elsewhere (tests).
Plan plan_stages(Graph graph, std::vector<Stage> stages, const Target& target, bool multi_step = false);

}  // namespace ark::compiler
