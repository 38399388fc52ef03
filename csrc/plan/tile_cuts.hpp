// Where a stage's axis may be cut.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.hpp"
#include "plan/region_history.hpp"

namespace ark::plan {

using Bounds = std::vector<int64_t>;  // of tiles: n + 1 numbers from 0 to the extent

// Cuts that may be good: even ones, and those of the stages that made the inputs (`cuts`, by stage).
std::vector<Bounds> candidate_cuts(const Graph& graph, const Stage& what, const Target& target, RegionHistory& history,
                                   const std::vector<Bounds>& cuts);

// Two tiles of one stage that touch the same byte, one of them writing, cannot run side by side.
bool tiles_conflict(const Graph& graph, const Stage& what, const Bounds& bounds);

}  // namespace ark::plan
