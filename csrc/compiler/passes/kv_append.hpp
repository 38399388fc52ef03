// Decoding: the stages that make the queries and add a position to the caches become the first part of the attention
// tasks that read them, in a GPU's plan.
//
// Queries are turned, the new key and value are turned and copied into the caches, and behind an event attention begins
// to load what has lain there all the time. Here each task of such an attention asks for its block of positions first,
// makes its own queries and its head's new key and value while that is under way, and takes the new ones from shared
// memory; whose block has the position writes them to the caches too. Nothing but a product's packets comes before it.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// After split_queries(). Adds values and buffers to the graph.
std::vector<Stage> fuse_kv_append(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
