// Split-K: products with fewer tiles than workers are cut along their depth.
//
// Large tiles read less per operation, but a deep and narrow product has few of them. Such a product becomes several,
// one per part of the depth, each with a float32 result. The stage that reads the result (a residual with its norm, for
// example) adds the parts in order as it loads an element, and rounds the sum once, as the product would have. No stage
// is added in between, and bits depend only on shapes and the number of workers.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Adds values and buffers to the graph. Applies only if a single row program reads the product's result; other stages
// are unchanged.
std::vector<Stage> split_k(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
