// Parts of an attention: stages over views of the same queries, keys, values, mask and result.
//
// A stage's axis cuts KV heads or the batch, whichever has more indices: 8 or 16 for a GPU's 132 workers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

int64_t heads_of(const Graph& graph, const AttentionStage& attention);  // query heads that share a KV head

// The attention for indices [begin, end) of a dimension: 0, the batch, 1, KV heads with their query heads, or 2, query
// rows. What has one index for all stays as it is. `share`: the part's share in the stage's operations.
Stage attention_part(Graph& graph, const Stage& stage, size_t dim, int64_t begin, int64_t end, double share);

// The dimension that the stage's axis does not cut, in as many equal parts as give every worker a tile.
int64_t count_across(const Graph& graph, const Stage& stage, const Target& target);
std::vector<Stage> parts_across(Graph& graph, const Stage& stage, const Target& target);

}  // namespace ark::compiler
