// Dual products: two products of the same rows whose results one elementwise program alone reads become one, as
// silu(x @ w1) * (x @ w3) in Llama's feed-forward network.
//
// Each tile multiplies the same columns of both matrices and applies the program to both sums before it stores one
// result. That removes a pass over both results, a wait between stages, and the stores and loads of the results. The
// program still gets sums that are rounded to the results' type.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Adds values to the graph. Applies to products that GPUs compute in tiles of many rows, where one stage is estimated
// to be faster than three. Other stages are unchanged.
std::vector<Stage> fuse_dual_products(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
