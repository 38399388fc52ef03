// What a row program computes only for a scatter to copy it goes straight to where the index says: one stage of two.
#pragma once

#include <vector>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// One position, as a decoding step writes its keys: of several the last must win, which takes an order.
std::vector<Stage> fuse_scatters(Graph& graph, std::vector<Stage> stages, const Target& target);

}  // namespace ark::compiler
