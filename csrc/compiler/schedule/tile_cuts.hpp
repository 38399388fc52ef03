// Where a stage's axis may be cut.
#pragma once

#include <cstdint>
#include <vector>

#include "compiler/schedule/box_history.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

using Bounds = std::vector<int64_t>;  // of tiles: n + 1 numbers from 0 to the extent

// Cuts that may be good: even ones, and those of the stages that made the inputs (`cuts`, by stage).
std::vector<Bounds> candidate_cuts(const Graph& graph, const Stage& what, const Target& target, BoxHistory& history,
                                   const std::vector<Bounds>& cuts);

// Two tiles of one stage that touch the same byte, one of them writing, cannot run side by side.
bool tiles_conflict(const Graph& graph, const Stage& what, const Bounds& bounds);

}  // namespace ark::compiler
