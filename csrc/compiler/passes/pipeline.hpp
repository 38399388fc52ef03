// The compiler's passes in the order in which they run, from a graph to a verified plan that is ready to be emitted.
//
// The table in pipeline.cpp is the whole pipeline; nothing runs after `verify`. Passes of the first phase rewrite
// stages, those of the second schedule them. Each row states what holds after its pass.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// The state that passes transform.
struct Compilation {
  Plan plan;                  // first its graph and stages, then tasks, events and memory
  std::vector<bool> own;      // by buffer: each worker has a copy; set by the schedule pass
  std::vector<bool> packets;  // by buffer: travels as packets; set by choose_packets
};

struct Pass {
  enum class Phase : uint8_t { stages, schedule };
  enum class On : uint8_t { all, gpu };
  enum class Steps : uint8_t { any, one, several };  // steps per launch

  const char* name;
  Phase phase;
  On on;
  Steps steps;
  void (*run)(Compilation&);
  const char* leaves;  // what holds afterwards, for reports

  bool takes(const Plan& plan) const;
};

std::span<const Pass> pipeline();

// Called after each pass that ran, with its row number in the table, from 1.
using PassObserver = std::function<void(const Pass& pass, int number, const Compilation& now)>;

// Throws Error(invalid_argument) if the graph is invalid or the target has no workers or pages.
Plan make_plan(Graph graph, const Target& target, bool multi_step = false, const PassObserver& observer = nullptr);
// The same from given stages (for tests).
Plan plan_stages(Graph graph, std::vector<Stage> stages, const Target& target, bool multi_step = false);

}  // namespace ark::compiler
