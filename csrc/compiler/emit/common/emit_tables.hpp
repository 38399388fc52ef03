// The tables of a plan that every target writes: operands' addresses, events that tasks wait for or signal, prefetches.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// The source's first line.
std::string made_from(const Plan& plan);

// The address of a value's first element plus `extra` bytes. The value is not a literal.
struct Place {
  enum Base : uint8_t { input, output, arena, own, packets } base = arena;
  int argument = 0;    // index among inputs or outputs
  int64_t offset = 0;  // bytes
};
Place place_of(const Plan& plan, int value, int64_t extra);

// Bytes: of operands that a GPU's threads load in pieces.
inline constexpr int64_t kPieceAlignment = 16;

// All tasks' waits, followed by all waits for the step before; all signals. Per task: index of the first one, and their
// number. Events of packets are left out.
struct EventTables {
  explicit EventTables(const Plan& plan);
  struct Wait {
    int event, threshold;
  };
  std::vector<Wait> waits;
  std::vector<int> signals;
  std::vector<int> first_wait, first_carried, first_signal, wait_count, signal_count;
};

// Joins adjacent loads, for users that only fetch and do not need pages.
std::vector<Load> merged_loads(const std::vector<Load>& loads);

// The prefetches to issue when each task of a queue starts: later tasks' parameters in the queue's order, at most
// `most` bytes before their use, or `beside` while the task itself loads as much, since memory is busy then. A task
// loads itself what could not be prefetched in time.
std::vector<std::vector<Load>> loads_ahead(const Queue& queue, int64_t most, int64_t beside);

}  // namespace ark::compiler
