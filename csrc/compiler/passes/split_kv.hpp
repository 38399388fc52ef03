// Attention of few query rows over many positions, as decoding has it, in blocks of positions (Dao et al., 2023:
// "Flash-Decoding for long-context inference").
//
// A stage's axis cuts key/value heads alone, and 8 of 132 workers would read a whole cache. Here such a stage becomes
// several, of blocks of positions, which leave each row's sums, greatest score and total in temporaries, and a stage
// that combines them in the order of blocks. Where blocks begin follows from shapes and the number of workers, so
// results do not depend on how many positions are looked at.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Adds values and buffers to the graph. Other stages stay as they are.
std::vector<Stage> split_kv(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
