// Cuts matrix products for a GPU.
//
// Stages are first cut as suits CPU threads: along columns in cache lines, so that each line of the result has one
// writer, or, with many rows, along rows. A GPU has more workers than many products have such lines, writes through to
// a shared cache, and computes tiles of rows and columns. Here a product of few rows is cut along columns as finely as
// its kernel works. One of many rows becomes several stages, one per block of rows, each cut along columns. Large tiles
// read less per operation, small tiles occupy more workers: the tile shape chosen is the one estimated to finish first.
// A product whose second matrix is too large for the cache is also cut into bands of columns, one after the other.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Adds values to the graph. Other stages are unchanged, and so are products cut by batch. Keeps a tile shape that is
// already set.
std::vector<Stage> tile_matmuls(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
