// Horizontal fusion: products of few rows that share their rows become one stage of a GPU's plan. Examples are query,
// key and value after a norm, and the two halves of a gated feed-forward network.
//
// Reading weights takes most of their time, and between two tasks a worker reads none for a microsecond or more. So a
// tile takes its part of every product and streams all their columns as one run (cuda/loop/products.cuh). The bits of a
// result are those of the product alone.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Runs after tile_matmuls().
std::vector<Stage> fuse_horizontally(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
