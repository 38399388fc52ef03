// Stages of one node: products (in fuse_matrix.cpp, of coded weights in fuse_codes.cpp), those by index (in
// fuse_indexed.cpp), attention, collectives.
#pragma once

#include <vector>

#include "compiler/graph/graph.hpp"
#include "compiler/graph/stage.hpp"

namespace ark::compiler {

// May add values to the graph. Throws Error(invalid_argument) for a node of another kind.
Stage single_stage(Graph& graph, int node);
Stage matmul_stage(Graph& graph, const Node& node);
Stage dequant_matmul_stage(Graph& graph, const Node& node);
// What a product touches, with coded weights or without, cut by columns or by rows.
std::vector<Access> product_accesses(const Graph& graph, const MatmulStage& product);
// What reads as its indices say.
Stage gather_stage(Graph& graph, const Node& node);
Stage scatter_stage(Graph& graph, const Node& node);
Stage bag_stage(Graph& graph, const Node& node);
Stage experts_stage(Graph& graph, const Node& node);
// Rows that are sorted, or summed along.
Stage select_stage(Graph& graph, const Node& node);
Stage scan_stage(Graph& graph, const Node& node);

}  // namespace ark::compiler
