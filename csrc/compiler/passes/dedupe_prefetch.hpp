// Decides which GPU worker prefetches which parameters ahead of its tasks (emit_tables.hpp).
//
// Tasks of many workers read the same parameters at about the same time: blocks of rows share weights, all rows share
// scales. They share the second-level cache, so each byte needs only one prefetch. The pages are dealt out among these
// tasks, and each worker's limit on bytes in flight then reaches further ahead.
#pragma once

#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Sets `prefetches` from the queues' loads.
void dedupe_prefetch(Plan& plan);

}  // namespace ark::compiler
