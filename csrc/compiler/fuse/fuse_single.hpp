// Stages of one node: products (fuse_matrix.cpp; with quantized weights fuse_codes.cpp, of float8 rows
// fuse_scaled.cpp), indexed operators (fuse_indexed.cpp), attention, collectives.
#pragma once

#include <cstdint>
#include <vector>

#include "compiler/graph/graph.hpp"
#include "compiler/graph/stage.hpp"

namespace ark::compiler {

constexpr int64_t kFewProductRows = 16;  // up to this many rows, products are cut by columns: every weight is read once

// May add values to the graph. Throws Error(invalid_argument) for a node of another kind.
Stage single_stage(Graph& graph, int node);
Stage matmul_stage(Graph& graph, const Node& node);
Stage dequant_matmul_stage(Graph& graph, const Node& node);
Stage scaled_matmul_stage(Graph& graph, const Node& node);
// The accesses of a product, quantized or not, cut by columns or by rows.
std::vector<Access> product_accesses(const Graph& graph, const MatmulStage& product);
// The bytes of the matrices of a product, or of a dual one.
double product_bytes(const Graph& graph, const MatmulStage& product);
// Operators that read or write by index.
Stage gather_stage(Graph& graph, const Node& node);
Stage scatter_stage(Graph& graph, const Node& node);
Stage bag_stage(Graph& graph, const Node& node);
Stage experts_stage(Graph& graph, const Node& node);
// Sorts and running sums along rows.
Stage select_stage(Graph& graph, const Node& node);
Stage scan_stage(Graph& graph, const Node& node);

}  // namespace ark::compiler
