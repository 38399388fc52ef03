// The loop that a worker runs: its queue of tasks from the plan's tables, once; in resident mode (a multi-step plan)
// `steps` times, or until a task says stop.
//
// For a step the host fills in a Launch and wakes the workers, and each of them calls run_worker with its number. A
// task waits for its events, runs, and signals the events that others wait for. Tables and functions are constants of
// the generated source; what differs from run to run is in the Launch.
#pragma once

#include "cpu/wait.hpp"

namespace ark::cpu {

// Memory order. A task's stores precede its signals (releases), and a wait ends with an acquire load of the count, so
// the waiter sees what earlier tasks stored. A signal is a read-modify-write: all signals of an event form one release
// sequence, so a count that several tasks reached together orders the waiter after each of them. Events only grow: step
// s waits for s * threshold, so nothing is reset between steps. The host orders launches: it starts none before all
// workers have left the previous one. That covers reused buffers, and counts after a failed step, which the host may
// reset to zero. Steps of one launch are ordered by carried waits for events of the step before, (s - 1) * threshold,
// which the plan's validator has checked.

// Runs one step. Returns false if it ends early. Stamps read the clock several times per task; without them the loop
// contains no trace of them.
template <bool stamped>
inline bool run_step(const Launch& launch, const Tables& tables, Context& context, Progress& progress) {
  const int worker = context.worker;
  [[maybe_unused]] const uint64_t done = progress.step - launch.step;
  [[maybe_unused]] Stamp* stamps = stamped ? launch.stamps + done * tables.tasks : nullptr;
  [[maybe_unused]] uint64_t* wait_ends = stamped ? launch.wait_ends + done * launch.waits : nullptr;
  const QueueEntry& queue = tables.queues[worker];
  Fetcher fetcher(launch, queue, worker, tables.fetch_ahead);
  char* p[kMostOperands];
  for (int position = 0; position < queue.task_count; ++position) {
    const TaskEntry& task = queue.tasks[position];
    if constexpr (stamped) stamps[task.task].came_ns = now_ns();
    fetcher.reached(position);
    for (int i = 0; i < task.carried_count; ++i) {
      const int at = task.carried + i;
      if (!await(launch, tables.waits[at], progress.step - 1, worker, task, fetcher, progress)) return false;
      if constexpr (stamped) wait_ends[at] = now_ns();
    }
    for (int i = 0; i < task.wait_count; ++i) {
      const int at = task.waits + i;
      if (!await(launch, tables.waits[at], progress.step, worker, task, fetcher, progress)) return false;
      if constexpr (stamped) wait_ends[at] = now_ns();
    }
    if (aborted(launch)) return false;
    for (int i = 0; i < task.operand_count; ++i) p[i] = address_of(launch, worker, tables.operands[task.operands + i]);
    context.task = task.task;
    context.stage = task.stage;
    if constexpr (stamped) stamps[task.task].begin_ns = now_ns();
    task.function(context, p, task.begin, task.end);
    if constexpr (stamped) stamps[task.task].end_ns = now_ns();
    if (aborted(launch)) return false;
    for (int i = 0; i < task.signal_count; ++i)
      protocol::add_ordered(launch.events[tables.signals[task.signals + i]].value, uint64_t{1});
  }
  return true;
}

inline void run_worker(const Launch& launch, const Tables& tables, int worker) {
  bool stop = false;
  Context context{&launch, launch.scratch + worker * launch.scratch_stride, &stop, worker, -1, -1};
  Progress progress{launch.step, 0, 0, 0};
  for (uint64_t done = 0; done < launch.steps && !stop; ++progress.step) {
    const uint64_t now = now_ns();
    if (done == 0) progress.asked_ns = now;
    progress.deadline_ns = launch.timeout_ns == 0 ? 0 : now + launch.timeout_ns;
    progress.collective_ns = protocol::load_relaxed(launch.report->collective_ns);
    const bool stamped = launch.stamps != nullptr && done < launch.stamped;
    const bool ended = stamped ? !run_step<true>(launch, tables, context, progress)
                               : !run_step<false>(launch, tables, context, progress);
    if (ended) return;
    ++done;
    if (worker != 0) continue;
    launch.report->steps = done;
    if (done < launch.steps && !stop && interrupted(launch, worker, progress)) return;
  }
}

}  // namespace ark::cpu
