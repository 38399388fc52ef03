// Where a stage's axis may be cut. The scheduler (tile.hpp) estimates the end of each candidate cut and takes the best.
#pragma once

#include <cstdint>
#include <vector>

#include "compiler/schedule/box_history.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

using Bounds = std::vector<int64_t>;  // of tiles: n + 1 numbers from 0 to the extent

// Candidate cuts: even ones, and those of the stages that made the inputs (`cuts`, by stage).
std::vector<Bounds> candidate_cuts(const Graph& graph, const Stage& what, const Target& target, BoxHistory& history,
                                   const std::vector<Bounds>& cuts);

// Whether two tiles touch the same byte, one of them writing, and thus cannot run concurrently.
bool tiles_conflict(const Graph& graph, const Stage& what, const Bounds& bounds);

}  // namespace ark::compiler
