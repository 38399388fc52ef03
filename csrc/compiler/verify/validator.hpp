// The checks of a plan, with which the pipeline ends. Each throws Error(invalid_argument) naming the offending task.
#pragma once

#include "compiler/schedule/events_order.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Runs all checks below. They find cycles, waits that cannot be met, buffers written or reused while live, values read
// before they are written, queues without a worker, tiles that do not cover a stage exactly once, and prefetches that
// miss what a task reads.
void validate(const Plan& plan);

// Checks that stages access existing values along existing dimensions and write no constant input.
void check_stages(const Plan& plan);
// validator.cpp: all indices are in range. The later checks rely on it.
void check_structure(const Plan& plan);
// Tiles cover each stage exactly once; replicas; placements.
void check_tiles(const Plan& plan);
void check_placements(const Plan& plan);
// The second half of a task reads only what the task itself wrote or what its stage declares.
void check_tails(const Plan& plan);
// Nothing is waited for or signalled between tasks that run as one.
void check_heads(const Plan& plan);
// validator_loads.cpp: the lists of loads.
void check_loads(const Plan& plan);
// validator_order.cpp: accesses to the same bytes are ordered within a step, also for own copies and shared
// temporaries.
void check_order(const Plan& plan);
// The same across two steps of a multi-step plan.
void check_steps(const Plan& plan);

}  // namespace ark::compiler
