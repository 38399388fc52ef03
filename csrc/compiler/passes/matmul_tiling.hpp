// Matrix products cut for a GPU.
//
// A stage's axis cuts columns or rows, as suits threads of a CPU: columns by cache lines, so that a result's line has
// one writer, and many rows by rows. A GPU has more workers than many a product has lines, writes through to a cache
// that all share, and computes in tiles of rows and columns. So here a product of few rows is cut by columns as finely
// as its kernel works, and one of many becomes several stages, of blocks of rows, each cut by columns. Large tiles read
// less for what they compute, small ones occupy more workers: the tile's shape is the one whose waves of tiles are
// estimated to end first.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Adds values to the graph. Other stages stay as they are, and so do products that are cut by batch. A tile's shape
// that is chosen already is kept.
std::vector<Stage> tile_matmuls(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
