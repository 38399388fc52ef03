// The times at which the tasks and waits of a step happened, for traces. The loops of both targets fill them in, and
// inspect/trace reads them.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/launch.hpp"

namespace ark::compiler {

// CLOCK_MONOTONIC, in ns; 0: did not happen. For a launch of several steps: of its first steps, one after the other.
struct StepStamps {
  std::vector<cpu::Stamp> tasks;  // by task
  // In plan order: the waits of all tasks, then their waits for the step before, plus one unused element. On a GPU,
  // where a task's waits run concurrently, each is the time at which the task began.
  std::vector<uint64_t> wait_ends;
};

}  // namespace ark::compiler
