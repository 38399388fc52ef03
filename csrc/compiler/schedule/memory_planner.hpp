// Where temporaries lie: one arena, and one more of each worker for what replicated stages compute.
//
// Two buffers share bytes only where every task that touches one has surely ended before any that touches the other
// starts: vector clocks over queues and events, so that no wait is added for the sake of memory. Of several orders of
// placing, the one with the smallest arena is kept.
#pragma once

#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

constexpr int64_t placement_alignment = 64;

// What a temporary takes of the arena.
int64_t placed_bytes(const Buffer& buffer, const Placement& placement);

// Fills in placements, arena_bytes, own_bytes, eager_peak_bytes of a plan that has events. `own`, `packets`: by buffer.
void plan_memory(Plan& plan, const std::vector<bool>& own, const std::vector<bool>& packets);

// What one buffer a result, freed after its last use, would take at most, in program order: temporaries only, as the
// arena is.
int64_t eager_peak(const Graph& graph);

}  // namespace ark::compiler
