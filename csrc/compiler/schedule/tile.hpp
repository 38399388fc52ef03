// From stages to tasks in static queues: how many tiles, where each is cut, which worker runs it.
//
// List scheduling in program order with estimated times. A stage's cut is the one that ends first among: even tiles
// for as many workers as are worth their wait, and the cuts of the stages that produced its inputs, so that a tile
// lies where its input was made and waits for nobody. A small stage may instead run whole on every worker
// (replicas), where that takes no longer than handing its result around.
//
// Queues keep program order, so that tasks in order of index are a valid order of execution. Communication tasks will
// come first among those that are ready: their place is the order in which cut_stages() walks the stages.
#pragma once

#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

struct Cut {
  std::vector<Task> tasks;  // without waits and signals
  std::vector<Queue> queues;
  std::vector<bool> own;  // by buffer: one copy a worker
  double estimated_us = 0;
};

Cut cut_stages(const Graph& graph, const std::vector<Stage>& stages, const Target& target);

// What a tile takes, beside waiting.
double tile_cost_us(const Graph& graph, const Stage& stage, const Target& target, int64_t begin, int64_t end);

}  // namespace ark::compiler
