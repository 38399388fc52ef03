// Small results in float32 between stages.
//
// What products of halves and row programs hand to row programs is computed in float32, and rounded only to be stored:
// a residual, queries before they are turned, the halves of a gated activation. Where it is small, as in a decoding
// step, storing twice as much costs nothing beside the weights, so it is not rounded there either, as it would not be
// inside a stage. An error of a step adds up from such roundings: the residual's is met once for each layer.
//
// What anything else reads (a product, attention, a collective, which rounds as the eager one) keeps its type.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Adds values and buffers to the graph. Before stages are merged or joined.
std::vector<Stage> fp32_intermediates(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
