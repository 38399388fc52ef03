// What a worker's loader fetches: parameters that its tasks read, in the order of its queue, in pages of the ring.
#pragma once

#include <vector>

#include "compiler/graph/box.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Whether the loader brings what an access reads: all of it is known before the plan starts. Of a gather's table it is
// not, as the index says which rows.
bool loaded_ahead(const Graph& graph, const Stage& stage, const Access& access);

// What of a value a task finds in the ring: what it reads through its accesses; all of it where these differ.
Box loaded_box(const Graph& graph, const Stage& stage, const Task& task, int value);

// Appends what task `index` reads, each byte once, in the order of its stage's accesses.
void add_loads(const Plan& plan, int index, std::vector<Load>& loads);

}  // namespace ark::compiler
