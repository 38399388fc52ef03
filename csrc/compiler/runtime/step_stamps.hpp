// When everything of a step happened, for traces.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/launch.hpp"

namespace ark::compiler {

// Of CLOCK_MONOTONIC, in ns. 0: it did not. Of a launch's first steps, one after the other.
struct StepStamps {
  std::vector<cpu::Stamp> tasks;  // by task
  // By place in the plan: the waits of its tasks one after the other, then those for the step before, and one more. On
  // a GPU, where a task's waits are under way together: when the task began.
  std::vector<uint64_t> wait_ends;
};

}  // namespace ark::compiler
