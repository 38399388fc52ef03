// Who of a GPU's workers asks for what ahead of their tasks (emit_tables.hpp).
//
// Tasks of many workers read the same parameters at about the same time: blocks of rows the same weights, all rows the
// same scales. Into the second-level cache, which they share, each byte has to be asked for once: the pages are dealt
// out among these tasks, and each worker's share of what may be under way reaches as much further ahead.
#pragma once

#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Sets `prefetches`, from the queues' loads.
void dedupe_prefetch(Plan& plan);

}  // namespace ark::compiler
