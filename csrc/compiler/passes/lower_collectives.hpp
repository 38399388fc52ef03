// Collectives as tasks of a GPU's loop kernel, spread over its workers (kernels/cuda/loop/collective.cuh).
//
// A tile is a range of the elements that each rank has: each rank pushes it to the others as packets, waits for theirs
// and combines them. Where the packets of a collective lie depends on the graph alone; ranks need not cut alike. A
// small one is cut as what makes its input (tile_cuts.cpp), so that who made a tile pushes it, and waits for peers
// alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Adds values to the graph. Collectives whose node has no attribute `ranks` stay as they are, for the host to run.
// Throws Error(invalid_argument) for what cannot be spread.
std::vector<Stage> lower_collectives(Graph& graph, std::vector<Stage> stages, const Target& target);

// What the ranks of the group that all spread collectives are of must have in common. `ranks` 0: there are none.
struct Exchanges {
  int64_t group = -1;  // of the region's
  int ranks = 0;
  int64_t bytes = 0;         // of packets that come to each rank
  uint64_t fingerprint = 0;  // of operators, types, sizes and places, in their order
};
Exchanges exchanges_of(const Graph& graph, const std::vector<Stage>& stages);

}  // namespace ark::compiler
