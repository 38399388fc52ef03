// Keeps small results between stages in float32.
//
// Products of half types and row programs compute in float32 and round only to store: a residual, queries before the
// rotary embedding, the halves of a gated activation. Such a result is small in a decoding step, so storing twice the
// bytes costs nothing beside the weights, and it stays unrounded, as it would within a stage. Rounding errors add up
// over a step: the residual would be rounded in every layer. What row programs hand to row programs, as a residual,
// stays unrounded in prompts too, as long as the second-level cache holds many such results. A result keeps its type if
// anything but a row program reads it: a product, attention, or a collective (which rounds as the eager one does).
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Adds values and buffers to the graph. Runs before stages are merged or joined.
std::vector<Stage> fp32_intermediates(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
