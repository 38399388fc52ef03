// Replicas in front of products of few rows become the first half of the products' tasks (Task::head) in a GPU's plan:
// a norm that every worker computes for itself is followed there by that worker's columns of the product. Between the
// two nothing is waited for, so they need not be two tasks, and the rows need not leave the SM.
#pragma once

#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// When all events are known. What a second half waited for its first half waits for from now on, and what that one
// signalled the second half signals.
void fuse_prologues(Plan& plan);

// What a task waits for before it begins, first half or not.
const std::vector<int>& waits_of(const Plan& plan, int task);

// The queue without tasks that are first halves; what is loaded for those is for the whole.
Queue in_one_go(const Plan& plan, const Queue& queue);

// The stage that all tasks of `stage` begin with; -1: there is none.
int head_stage(const Plan& plan, int stage);

// Buffers that are written by first halves and read by the second halves of the same tasks, and touched by nothing else
// but replicas that nobody reads: at most `most` bytes. Of which stage is the second half.
std::vector<int> kept_in(const Plan& plan, int stage, int64_t most);

}  // namespace ark::compiler
