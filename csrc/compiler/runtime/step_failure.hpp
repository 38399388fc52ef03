// What a loop kernel's step that ended early reports to its caller, on every target, and the Error made from it.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

struct StepFailure {
  enum class Kind : uint8_t { aborted, deadline, index_too_large, collective, peer } kind = Kind::aborted;
  int worker = -1, task = -1, stage = -1, event = -1, dimension = 0;
  int64_t value = 0, limit = 0;  // peer: the rank that was waited for
  std::chrono::milliseconds timeout{};
};

// Converts a target's own report, whose fields have the same names.
template <class Report>
StepFailure step_failure(StepFailure::Kind kind, const Report& report, std::chrono::milliseconds timeout) {
  return {kind,         report.worker, report.task, report.stage, report.event, report.dimension,
          report.value, report.limit,  timeout};
}

// Describes where a step that waited for a peer was left.
std::string describe_left(const Plan& plan, const StepFailure& failure);

// Throws Error: out_of_range (an index), invalid_argument (a check that failed), timeout (a wait), system (a
// collective), peer_lost, aborted.
[[noreturn]] void raise_step_failure(const Plan& plan, const StepFailure& failure);

}  // namespace ark::compiler
