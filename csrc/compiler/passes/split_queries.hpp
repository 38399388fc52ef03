// Splits attention over many query rows into as many stages as keep a GPU's workers busy. For few rows see
// split_kv.hpp.
//
// A stage's axis cuts KV heads or the batch: 8 or 16 of them for a GPU's 132 workers. Here each such stage becomes
// several, by the other of these dimensions, and by blocks of query rows: views of the same queries and results. Of a
// block's sizes the one is chosen whose tasks are estimated to end first.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Adds values to the graph. Other stages are unchanged, and so is attention with enough heads or few rows.
std::vector<Stage> split_queries(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
