// Collectives as tasks of a GPU's loop kernel, spread over its workers (kernels/cuda/loop/collective.cuh).
//
// A tile is a range of the elements that each rank has. Each rank pushes its range to the others as packets, waits for
// theirs, and combines them. The place of a collective's packets depends on the graph alone, so ranks may cut
// differently. A small collective is cut like its input's producer (tile_cuts.cpp): the worker that made a tile pushes
// it, and waits for peers only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Adds values to the graph. Collectives whose node has no attribute `ranks` are unchanged and run by the host. Throws
// Error(invalid_argument) for a collective that cannot be spread.
std::vector<Stage> lower_collectives(Graph& graph, std::vector<Stage> stages, const Target& target);

// Why tasks cannot run this collective of a group over several nodes, each of `places` ranks; empty: they can. `bytes`:
// of a rank's part.
std::string why_not_over_nodes(const std::string& op, const std::string& reduce_op, ScalarType type, int64_t bytes,
                               int nodes, int places);

// What all ranks of the spread collectives' single group must agree on. `ranks` 0: there are no spread collectives.
struct Exchanges {
  int64_t group = -1;  // index among the region's groups
  int ranks = 0;
  int64_t bytes = 0;         // packet bytes that each rank receives
  int nodes = 1, lanes = 0;  // over several: lanes of the window between them, and the most bytes of a message
  int64_t message_bytes = 0;
  uint64_t fingerprint = 0;  // hash of operators, types, sizes and places, in order
};
Exchanges exchanges_of(const Graph& graph, const std::vector<Stage>& stages);

}  // namespace ark::compiler
