// Places temporaries in one arena, and in one more per worker for the results of replicated stages.
//
// Two buffers share bytes only if every task that touches one has certainly ended before any task that touches the
// other starts. Vector clocks over queues and events prove that, so no wait is added to save memory. Several placement
// orders are tried and the smallest arena is kept.
#pragma once

#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

constexpr int64_t placement_alignment = 64;

// Bytes that a temporary takes in the arena.
int64_t placed_bytes(const Buffer& buffer, const Placement& placement);

// Sets placements, arena_bytes, own_bytes and eager_peak_bytes of a plan that has events. `own`, `packets`: by buffer.
void plan_memory(Plan& plan, const std::vector<bool>& own, const std::vector<bool>& packets);

// Peak bytes if every result had its own buffer, freed after its last use in program order. Counts temporaries only,
// like the arena.
int64_t eager_peak(const Graph& graph);

}  // namespace ark::compiler
