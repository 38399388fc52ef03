// Scatter fusion: a row program whose result only a scatter copies stores directly to the indexed position, which makes
// one stage of two.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Applies to a single position, as when decoding writes its keys. With several the last must win, which takes an order.
std::vector<Stage> fuse_scatters(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
