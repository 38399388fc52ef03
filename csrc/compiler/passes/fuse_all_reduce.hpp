// Sums over ranks that no task of their own makes (kernels/cuda/loop/pushed.cuh).
//
// Where a product of few rows makes what an all_reduce adds up and nobody else reads it, the product's tasks send it to
// all ranks as packets, and whoever reads the sum adds the ranks' parts. Between the product and the next one there is
// neither a task nor an event, but one way over the link. Bits stay the same: parts are rounded as the product's result
// was, and added in order of ranks.
#pragma once

#include <vector>

#include "compiler/graph/graph.hpp"
#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// After lower_collectives(); for plans of one step a launch whose target has packets of rows. Adds values to the
// graph. Collectives with other makers, those that others than row programs read (a product has no registers for the
// parts of all ranks), and those that take turns in their places, stay.
std::vector<Stage> fuse_all_reduce(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
