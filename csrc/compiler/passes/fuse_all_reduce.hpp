// Fuses an all_reduce into its producer and its readers, without separate tasks (kernels/cuda/loop/pushed.cuh).
//
// If a product of few rows computes the addends and nothing else reads them, the product's tasks send them to all ranks
// as packets, and each reader of the sum adds the ranks' parts. Between two products there is then neither a task nor
// an event, only one trip over the link. Bits stay the same: parts are rounded like the product's result, and added in
// rank order.
#pragma once

#include <vector>

#include "compiler/graph/graph.hpp"
#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Runs after lower_collectives(), for plans of one step per launch whose target has packets of rows. Adds values to the
// graph. Unchanged are collectives with other producers, those read by anything but row programs (a product has no
// registers for all ranks' parts), and those that take turns in shared places.
std::vector<Stage> fuse_all_reduce(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
