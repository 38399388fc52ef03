// In decoding, moves the stages that make the queries and append to the caches into the attention tasks that read them,
// in a GPU's plan.
//
// Unfused, attention waits for the rotary embedding of the queries and for the copies of the new key and value, and
// only then loads cache contents that were there all along. Fused, each task first requests its block of positions,
// computes its own queries and its head's new key and value meanwhile, and takes the new ones from shared memory. The
// task whose block contains the position also writes them to the caches. All that precedes is a product's packets.
//
// A batch of sequences at the same position is one sequence with more heads: attention has these dimensions merged
// (attention_stage() in fuse_single.cpp).
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Runs after split_queries(). Adds values and buffers to the graph.
std::vector<Stage> fuse_kv_append(Graph& graph, std::vector<Stage> stages, const Target& target);

// The buffers that the programs of such a stage write, which stay in a block's shared memory (kKeptBytes): of queries,
// of new keys and of new values.
std::vector<int> made_buffers(const Graph& graph, const Stage& stage);
// Whether they have room for all heads. Otherwise, as with a large batch, they have room for one: a task makes, and
// then uses, what belongs to one head after the other.
bool keeps_all_heads(const Graph& graph, const Stage& stage);

}  // namespace ark::compiler
