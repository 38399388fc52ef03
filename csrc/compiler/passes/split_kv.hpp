// Flash-decoding: attention of few query rows over many positions, split into blocks of positions (Dao et al., 2023:
// "Flash-Decoding for long-context inference").
//
// A stage's axis cuts KV heads or the batch, so 8 of 132 workers would read a whole cache. Here such a stage becomes
// several: by the other of these dimensions, and, if workers are left, by blocks of positions. Those store each row's
// sums, maximum score and total in temporaries, which another stage combines in the order of blocks. Blocks depend only
// on shapes and the number of workers, so results do not depend on how many positions are read.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Adds values and buffers to the graph. Other stages are unchanged.
std::vector<Stage> split_kv(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
