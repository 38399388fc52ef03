// Stages of one node: products (in fuse_matrix.cpp), attention, gather, scatter, collectives.
#pragma once

#include "plan/graph.hpp"
#include "plan/stage.hpp"

namespace ark::plan {

// May add values to the graph. Throws Error(invalid_argument) for a node of another kind.
Stage single_stage(Graph& graph, int node);
Stage matmul_stage(Graph& graph, const Node& node);

}  // namespace ark::plan
