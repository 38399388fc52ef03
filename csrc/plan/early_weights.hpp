// Which products find the end of their weights in shared memory (cuda/loop/early_weights.cuh has the why and the
// protocol), and where it lies.
//
// A kernel for few rows (cuda/loop/matvec.cuh) takes a tile's columns in batches: of as many as its warps take
// together, and, of a depth that is more than the warps' side by side, in passes. What it takes last is what is copied:
// the last pass of the last batch, 64 KB where all warps have columns.
#pragma once

#include <vector>

#include "plan/plan.hpp"

namespace ark::plan {

// A part of it: `rows` pieces of `bytes`, `stride` apart from `offset` of the value's buffer on; in the area from `to`
// on, `pitch` apart.
struct EarlyPart {
  int value = -1;
  int64_t offset = 0, rows = 1, bytes = 0, stride = 0;
  int64_t to = 0, pitch = 0;
};

// Sets MatmulStage::early where a GPU's target has the bulk copy engine (compute capability 9.0) and the shared memory.
void mark_early_weights(Plan& plan);

// Whether any is marked.
bool has_early_weights(const Plan& plan);

// Of a task whose stage is marked; of others none.
std::vector<EarlyPart> early_parts(const Plan& plan, const Task& task);

// The queue without those loads of its tasks that are early.
Queue without_early(const Plan& plan, const Queue& queue);

}  // namespace ark::plan
