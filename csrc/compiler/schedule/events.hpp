// Turns conflicting accesses into events: two tasks that touch the same byte, one of them writing, must run in program
// order.
//
// A task's predecessors are gathered by stage; equal sets share one event. A wait is dropped if the worker is sure
// already: by its own order, by earlier waits, or by what their signallers had waited for. Events without waiters are
// not created. Where the target has packets, small temporaries that one stage writes and other workers read become
// packets, and every reader polls the data itself.
#pragma once

#include <vector>

#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

// By buffer: nonzero if it can never travel as packets, however stages are cut, because kernels do not write or poll it
// as packets, or because it is large.
std::vector<char> plain_buffers(const Graph& graph, const std::vector<Stage>& stages, const Target& target);
// By buffer: whether it travels as packets. None does without packets or in a multi-step plan. `own`: by buffer.
std::vector<bool> choose_packets(const Plan& plan, const std::vector<bool>& own);
// Sets waits, signals and events of a plan that has tasks, queues and stages. `own`, `packets`: by buffer.
void add_events(Plan& plan, const std::vector<bool>& own, const std::vector<bool>& packets);
// Orders each step of a multi-step plan after the one before (Task::carried), after add_events() and plan_memory(). On
// a GPU all workers meet at one event between steps. On a CPU every pair of tasks that touch the same bytes in memory
// is ordered, and so are the signallers of an event: a counter separates steps only if all signals of one precede any
// of the next.
void add_carried(Plan& plan);

}  // namespace ark::compiler
