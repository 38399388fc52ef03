// Weights that a GPU brings into shared memory before the task that multiplies by them has its turn, while the worker
// waits and small tasks run (kernels/cuda/loop/held.cuh).
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.hpp"

namespace ark::plan {

// For the task at place `task` of a queue, asked for at place `from`, which is before it, or its own if it waits
// for something: the first columns of its products, in their order.
struct HeldLoads {
  size_t from = 0, task = 0;
  std::vector<Load> pieces;
};

// Of one queue, in its order. There is one room of `room` bytes: it is free again when the task that used it has ended.
// Products of few rows whose columns' depth is adjacent, one column behind the other, are the ones that can use it.
std::vector<HeldLoads> held_loads(const Plan& plan, const Queue& queue, int64_t room);

// The queue without what is held.
Queue without_held(Queue queue, const std::vector<HeldLoads>& held);

}  // namespace ark::plan
