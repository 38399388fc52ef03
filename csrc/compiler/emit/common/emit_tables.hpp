// A plan's tables as every target writes them: where operands lie, which events tasks wait for and bump, what is
// fetched ahead.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// The source's first line.
std::string made_from(const Plan& plan);

// Where the first element of a value (that is no literal) lies, and `extra` bytes behind it.
struct Place {
  enum Base : uint8_t { input, output, arena, own, packets } base = arena;
  int argument = 0;    // of inputs or outputs
  int64_t offset = 0;  // in bytes
};
Place place_of(const Plan& plan, int value, int64_t extra);

// All waits of tasks, then all waits for the step before; all signals. By task: the first of each, and how many. Events
// of packets are none of them.
struct EventTables {
  explicit EventTables(const Plan& plan);
  std::string waits;    // "{event, threshold}, ..."
  std::string signals;  // "event, ..."
  std::vector<int> first_wait, first_carried, first_signal, wait_count, signal_count;
};

// Pages are of no interest to who only fetches: neighbours become one entry.
std::vector<Load> merged_loads(const std::vector<Load>& loads);

// What is asked for when each task of a queue has its turn: parameters of later tasks, in the order of the queue, at
// most `most` bytes before their use, or `beside` while a task is busy loading as much itself: memory has no time then.
// What a task's own turn comes too early for it loads itself.
std::vector<std::vector<Load>> loads_ahead(const Queue& queue, int64_t most, int64_t beside);

}  // namespace ark::compiler
