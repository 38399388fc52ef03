// Products whose results are finished where they are made.
//
// A pass over the elements of a product that nobody else reads (an activation) is done by the product's own tiles, on
// each sum before it is stored: a stage less to wait for, and the result is neither stored nor read in between. It is
// rounded as it would have been, so bits stay the same.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Adds values to the graph. For GPUs, where many rows are multiplied in tiles; others stay as they are.
std::vector<Stage> fuse_epilogues(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
