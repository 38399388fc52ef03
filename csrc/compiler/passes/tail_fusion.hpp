// Pointwise stages of a product's columns become the second half of its tasks in a GPU's plan (Stage::tail): the
// activation of a feed-forward network needs nothing but the columns that the task has just computed, so that nobody
// waits for an event between them.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// After fuse_horizontally(). What such a stage reads beside the product's results must be older than the product's
// rows, so that it delays nothing.
std::vector<Stage> fuse_tails(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
