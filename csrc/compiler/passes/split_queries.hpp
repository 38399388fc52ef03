// Attention in as many stages as keep a GPU's workers busy: over many query rows here, over few in split_kv.hpp.
//
// A stage's axis cuts key/value heads alone, and there are 8 or 16 of them where a GPU has 132 workers. Here each such
// stage becomes several, of blocks of query rows: views of the same queries and results, the same keys and values.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Adds values to the graph. Other stages stay as they are, and so does attention with enough heads or few rows.
std::vector<Stage> split_queries(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
