// In decoding, moves the stages that make the queries and append to the caches into the attention tasks that read them,
// in a GPU's plan.
//
// Unfused, attention waits for the rotary embedding of the queries and for the copies of the new key and value, and
// only then loads cache contents that were there all along. Fused, each task first requests its block of positions,
// computes its own queries and its head's new key and value meanwhile, and takes the new ones from shared memory. The
// task whose block contains the position also writes them to the caches. All that precedes is a product's packets.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Runs after split_queries(). Adds values and buffers to the graph.
std::vector<Stage> fuse_kv_append(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
