// Prologue fusion, in a GPU's plan: a replica in front of a product of few rows becomes the first half of the product's
// task (Task::head). For example, a norm that every worker computes for itself is followed by that worker's columns of
// the product. Nothing is awaited between the two, so one task suffices and the rows stay in the SM.
#pragma once

#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Runs when all events are known. The first half takes over the second half's waits; the second half takes over the
// first half's signals.
void fuse_prologues(Plan& plan);

// The events that a task waits for before it starts, including those of its first half.
const std::vector<int>& waits_of(const Plan& plan, int task);

// The queue without the first halves as tasks of their own. Their loads go to the whole task.
Queue in_one_go(const Plan& plan, const Queue& queue);

// The stage with which all tasks of `stage` start; -1 if there is none.
int head_stage(const Plan& plan, int stage);

// Buffers that need not leave the SM: first halves write them, the second halves of the same tasks read them, and
// nothing else touches them but replicas without readers. At most `most` bytes in total. `stage` is the second
// halves' stage.
std::vector<int> kept_in(const Plan& plan, int stage, int64_t most);

}  // namespace ark::compiler
