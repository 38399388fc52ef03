// Matrix products of few rows that share their rows become one stage of a GPU's plan: query, key and value after a
// norm, the two halves of a gated feed-forward network.
//
// Their time is that of reading weights, and from one task to the next a worker reads none for a microsecond or more:
// so a tile takes its part of every product, and their columns pass as one run (cuda/loop/products.cuh). The bits of a
// result are those of the product by itself.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// After tile_matmuls().
std::vector<Stage> fuse_horizontally(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
