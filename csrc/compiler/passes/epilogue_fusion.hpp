// Epilogue fusion: an elementwise program (an activation) that alone reads a product's result moves into the product.
//
// The product's tiles apply it to each sum before storing it. That removes a wait between stages, and a store and a
// load of the result. The sum is rounded as before, so bits stay the same.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Adds values to the graph. Applies to products that GPUs compute in tiles of many rows; other stages are unchanged.
std::vector<Stage> fuse_epilogues(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
