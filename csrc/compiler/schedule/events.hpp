// From tasks that touch bytes to events that order them.
//
// Two tasks that touch the same byte, one of them writing, must run in program order. A task's predecessors are
// gathered by the stage that they belong to; those with the same predecessors share one event. A wait is left out
// where the task's worker surely knows already: by its own order, by earlier waits, by what the signallers of those had
// waited for. Events that nobody waits for do not come to be.
//
// Where the target has packets, small temporaries that one stage writes and other workers read become packets: their
// readers poll the data, whoever else has polled it before.
//
// Multi-step plans order a step after the one before in the same way (Task::carried): every pair of tasks that touch
// the same bytes, now by place in memory, and the signallers of an event, as a counter tells its steps apart only when
// all signals of one step come before any of the next. On a GPU all workers meet between two steps, by one event.
#pragma once

#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// Which buffers cannot, however the stages are cut: what kernels do not write and poll, what is large.
std::vector<char> plain_buffers(const Graph& graph, const std::vector<Stage>& stages, const Target& target);
// Which buffers become packets; none where the target has no packets or steps are multi-step. `own`: by buffer.
std::vector<bool> choose_packets(const Plan& plan, const std::vector<bool>& own);
// Fills in waits, signals and events of a plan that has tasks, queues and stages. `own`, `packets`: by buffer.
void add_events(Plan& plan, const std::vector<bool>& own, const std::vector<bool>& packets);
// Fills in `carried` of a multi-step plan, after add_events() and plan_memory().
void add_carried(Plan& plan);

}  // namespace ark::compiler
