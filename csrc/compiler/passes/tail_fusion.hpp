// Tail fusion: pointwise stages over a product's columns become the second half of its tasks in a GPU's plan
// (Stage::tail). The activation of a feed-forward network, for example, needs only the columns that the task has just
// computed, so no event is awaited in between.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Runs after fuse_horizontally(). Whatever else the stage reads must be older than the product's rows, so that it
// delays nothing.
std::vector<Stage> fuse_tails(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
