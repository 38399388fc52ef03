// The parameters that a worker loads ahead of its tasks: no dependency guards them, so the list is known before the
// first task. It follows the order of the queue, in pages of the ring.
#pragma once

#include <vector>

#include "compiler/graph/box.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Whether an access can be loaded ahead, which requires that it is fully known before the plan starts. A gather's table
// is not: the index selects its rows.
bool loaded_ahead(const Graph& graph, const Stage& stage, const Access& access);

// The part of a value that a task finds loaded: the box of its accesses, or the whole value if they differ. Runs that
// almost touch are one, with what lies between.
Box loaded_box(const Graph& graph, const Stage& stage, const Task& task, int value);

// Appends the loads of task `index`, each byte once, in the order of its stage's accesses.
void add_loads(const Plan& plan, int index, std::vector<Load>& loads);

}  // namespace ark::compiler
