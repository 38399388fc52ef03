// The checks of a plan. Each throws Error(invalid_argument) that names the offending task.
#pragma once

#include "compiler/schedule/events_order.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// All of the below: a cycle, a wait that cannot be met, a buffer written or reused while it is alive, a value read
// before it is written, a queue for no worker, tiles that do not cover a stage once, a ring that does not hold a task's
// pages.
void validate(const Plan& plan);

// Stages by themselves: that they touch values that are there, along dimensions that these have, and write no constant
// input.
void check_stages(const Plan& plan);
// validator.cpp: that all indices lie within their lists; everything after may rely on it.
void check_structure(const Plan& plan);
// That tiles cover each stage once, replicas, placements.
void check_tiles(const Plan& plan);
void check_placements(const Plan& plan);
// That a task's second half reads what the task itself has written, or what its stage declares.
void check_tails(const Plan& plan);
// That nothing is waited for or told between tasks that are run in one go.
void check_heads(const Plan& plan);
// validator_loads.cpp: the loaders' lists.
void check_loads(const Plan& plan);
// validator_order.cpp: that what touches the same bytes is ordered, within a step; own copies, and temporaries that
// share bytes.
void check_order(const Plan& plan);
// The same across two steps of a multi-step plan.
void check_steps(const Plan& plan);

}  // namespace ark::compiler
