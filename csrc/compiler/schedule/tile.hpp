// Cuts stages into tasks and puts these into static queues: how many tiles, where to cut, which worker runs each.
//
// It is list scheduling in program order with estimated times. Of a stage's possible cuts the one that ends first is
// taken: even cuts for as many workers as are worth their wait, and the cuts of the stages that made its inputs, so
// that a tile runs where its input is and waits for no one. A small stage may instead run whole on every worker
// (replicas) if that takes no longer than passing its result around. Queues keep program order, so tasks in index order
// are a valid execution order.
#pragma once

#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

struct Cut {
  std::vector<Task> tasks;  // without waits and signals
  std::vector<Queue> queues;
  std::vector<bool> own;  // by buffer: one copy per worker
  double estimated_us = 0;
};

Cut cut_stages(const Graph& graph, const std::vector<Stage>& stages, const Target& target);

// Estimated time of a tile, without waiting.
double tile_cost_us(const Graph& graph, const Stage& stage, const Target& target, int64_t begin, int64_t end);

}  // namespace ark::compiler
