// The loop that a worker runs: its queue of tasks, from the plan's tables, once through; in resident mode (a chained
// plan) `steps` times, until a task has said stop.
//
// A step. The host fills in a Launch, wakes the workers, and every one of them calls run_worker with its number. A task
// waits for its events, runs, and bumps the events that others wait for. Tables and functions are constants of the
// generated source; whatever differs from run to run stands in the Launch.
//
// Memory order. A task's stores come before the bump of its events (a release), and a wait ends with an acquire load of
// the count, so whoever has waited sees what the tasks before stored. A bump is a read-modify-write: all bumps of an
// event are one release sequence, so the count that several tasks reached together orders behind each of them. Events
// only grow: step s waits for s * threshold, so nothing is reset between steps. Two launches are ordered by the host,
// which starts none before all workers have left the one before; that covers buffers written again, and counts after a
// failed step, which the host may then set to zero. Two steps of one launch are ordered by what tasks carry: waits for
// events of the step before, (s - 1) * threshold, which the plan's validator has found to be enough.
//
// Every wait has a bound: it spins, then yields its processor, looks at the abort word each time, and ends at the
// deadline with a report of who waited and for what. The first report wins; it raises the abort word, so that all
// leave.
#pragma once

#include <sched.h>
#include <time.h>

#include <iterator>

#include "cpu/types.hpp"
#include "protocol/atomics.hpp"

#if defined(__x86_64__) || defined(__i386__)
#define ARK_PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define ARK_PAUSE() asm volatile("yield")
#else
#define ARK_PAUSE() ((void)0)
#endif

namespace ark::cpu {

// Number of everything here that host and generated source must agree on.
inline constexpr uint32_t kAbi = 4;

struct alignas(64) EventCount {
  uint64_t value;
};

enum class Failure : uint32_t {
  none,
  aborted,          // the caller wants it to end
  deadline,         // a wait took too long: `task`, `event`, `worker`
  index_too_large,  // an index out of range: `stage`, `value`, `limit`, `dimension`
  collective,       // the host's collective failed, and keeps the reason: `stage`
};

// Why a step ended early. `claimed` is taken by the first to fail, who then fills in the rest and releases `failure`.
struct alignas(64) Report {
  uint32_t abort;    // everybody leaves as soon as it is not 0
  uint32_t claimed;  // by worker + 1
  uint32_t failure;
  int32_t worker, task, stage, event, dimension;
  int64_t value, limit;
  // Worker 0 is in a collective, which may wait for its peers as long as its group allows; and how long it has been in
  // those of this step that have ended.
  uint32_t in_collective;
  uint64_t collective_ns;
  uint64_t steps;  // done by worker 0, and so by all where nothing failed
};

// When a worker came to a task, began it (after its waits) and ended it; of CLOCK_MONOTONIC.
struct Stamp {
  uint64_t came_ns, begin_ns, end_ns;
};

struct Launch {
  uint32_t abi;
  uint32_t workers;
  const void* const* inputs;
  void* const* outputs;
  char* arena;
  char* own;  // worker w's begins at own + w * own_stride
  int64_t own_stride;
  char* scratch;  // likewise
  int64_t scratch_stride;
  EventCount* events;
  Report* report;
  // Of the first `stamped` steps; nullptr: not asked for.
  Stamp* stamps;        // by step and task
  uint64_t* wait_ends;  // by step and place in the table of waits, of which there are `waits`; there when stamps are
  uint64_t stamped, waits;
  uint64_t step;        // from 1: the first of this launch
  uint64_t steps;       // at most; 1 where the plan is not chained
  uint64_t timeout_ns;  // for all waits of a step together; 0: none
  // Runs the collective of a node of the graph on the thread that called; false: it failed.
  bool (*collective)(void* host, int32_t node, const void* input, void* output);
  void* host;
  // Whether to end early; asked now and then on the thread that called, in resident mode. nullptr: never.
  bool (*interrupted)(void* asker);
  void* asker;
};

// What a task's function may need beside its operands.
struct Context {
  const Launch* launch;
  char* scratch;
  bool* stop;  // the worker's own: no step follows
  int32_t worker, task, stage;
};

// Where an operand lies.
struct Operand {
  enum Base : uint32_t { input, output, arena, own };
  uint32_t base;
  uint32_t index;  // of inputs or outputs
  int64_t offset;  // in bytes
};

struct WaitFor {
  int32_t event;
  uint32_t threshold;
};

struct TaskEntry {
  void (*function)(const Context& context, char* const* p, int64_t begin, int64_t end);
  int64_t begin, end;
  int32_t task, stage;
  int32_t operands, operand_count;  // first of them in the table, and how many
  int32_t waits, wait_count;
  int32_t carried, carried_count;  // waits for the step before
  int32_t signals, signal_count;
};

// What a worker that waits may fetch: `rows` pieces of `bytes`, `stride` apart, for the task at `position` of its
// queue.
struct LoadEntry {
  Operand operand;
  int32_t position;
  int32_t rows;
  int64_t bytes, stride;
};

struct QueueEntry {
  const TaskEntry* tasks;
  int32_t task_count;
  const LoadEntry* loads;
  int32_t load_count;
};

// What the source says about itself.
struct PlanInfo {
  uint32_t abi;
  uint32_t workers, events, tasks;
  int64_t scratch_bytes;  // of each worker
};

struct Tables {
  const QueueEntry* queues;
  const Operand* operands;
  const WaitFor* waits;
  const int32_t* signals;
  int64_t fetch_ahead;  // bytes
  uint64_t tasks;       // of all queues
};

inline constexpr int kMostOperands = 64;

inline uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(time.tv_nsec);
}

ARK_INLINE bool aborted(const Launch& launch) {
  return protocol::load_relaxed(launch.report->abort) != 0;
}

// Tells the host why this step ends early, unless somebody else has, and makes all workers leave.
inline void fail(const Launch& launch, Failure failure, int worker, int task, int stage, int event, int64_t value,
                 int64_t limit, int dimension = 0) {
  Report& report = *launch.report;
  uint32_t nobody = 0;
  if (protocol::compare_exchange(report.claimed, nobody, static_cast<uint32_t>(worker) + 1)) {
    report.worker = worker;
    report.task = task;
    report.stage = stage;
    report.event = event;
    report.dimension = dimension;
    report.value = value;
    report.limit = limit;
    protocol::store_release(report.failure, static_cast<uint32_t>(failure));
  }
  protocol::store_release(report.abort, uint32_t{1});
}

// True when the index may be used for that dimension of a table. `given` is what the user wrote for it.
ARK_INLINE bool index_fits(const Context& context, int64_t index, int64_t limit, int64_t given, int dimension) {
  if (static_cast<uint64_t>(index) < static_cast<uint64_t>(limit)) return true;
  fail(*context.launch, Failure::index_too_large, context.worker, context.task, context.stage, -1, given, limit,
       dimension);
  return false;
}

ARK_INLINE bool index_fits(const Context& context, int64_t index, int64_t limit) {
  return index_fits(context, index, limit, index, 0);
}

inline void collective(const Context& context, int32_t node, const void* input, void* output) {
  const Launch& launch = *context.launch;
  Report& report = *launch.report;
  const uint64_t begin = now_ns();
  protocol::store_release(report.in_collective, uint32_t{1});
  const bool done = launch.collective != nullptr && launch.collective(launch.host, node, input, output);
  protocol::store_relaxed(report.collective_ns, report.collective_ns + (now_ns() - begin));
  protocol::store_release(report.in_collective, uint32_t{0});
  if (!done) fail(launch, Failure::collective, context.worker, context.task, context.stage, -1, node, 0);
}

ARK_INLINE char* address_of(const Launch& launch, int worker, const Operand& operand) {
  switch (operand.base) {
    case Operand::input: return static_cast<char*>(const_cast<void*>(launch.inputs[operand.index])) + operand.offset;
    case Operand::output: return static_cast<char*>(launch.outputs[operand.index]) + operand.offset;
    case Operand::arena: return launch.arena + operand.offset;
    default: return launch.own + worker * launch.own_stride + operand.offset;
  }
}

// Walks a queue's loads ahead of its tasks, a few cache lines at a time, and only while there is nothing else to do.
class Fetcher {
 public:
  Fetcher(const Launch& launch, const QueueEntry& queue, int worker, int64_t ahead)
      : launch_(launch), queue_(queue), worker_(worker), ahead_(ahead) {}

  // What tasks before `position` read is of no use any more. The budget begins anew with each task.
  void reached(int position) {
    fetched_ = 0;
    while (next_ < queue_.load_count && queue_.loads[next_].position < position) {
      ++next_;
      row_ = 0;
      byte_ = 0;
    }
  }

  void fetch_some() {
    for (int line = 0; line < 8 && next_ < queue_.load_count && fetched_ < ahead_; ++line) {
      const LoadEntry& load = queue_.loads[next_];
      __builtin_prefetch(address_of(launch_, worker_, load.operand) + row_ * load.stride + byte_, 0, 2);
      fetched_ += 64;
      byte_ += 64;
      if (byte_ < load.bytes) continue;
      byte_ = 0;
      if (++row_ < load.rows) continue;
      row_ = 0;
      ++next_;
    }
  }

 private:
  const Launch& launch_;
  const QueueEntry& queue_;
  const int worker_;
  const int64_t ahead_;
  int next_ = 0;
  int64_t row_ = 0, byte_ = 0, fetched_ = 0;
};

// Where a worker is.
struct Progress {
  uint64_t step;           // from 1
  uint64_t deadline_ns;    // of this step, on CLOCK_MONOTONIC; 0: none
  uint64_t collective_ns;  // what collectives had taken when it began
  uint64_t asked_ns;       // when the host was last asked whether to end
};

// Asks the host, worker 0 alone and not often: it may need a lock of its own for the answer.
inline bool interrupted(const Launch& launch, int worker, Progress& progress) {
  if (launch.interrupted == nullptr || worker != 0) return false;
  const uint64_t now = now_ns();
  if (now < progress.asked_ns + 50'000'000u) return false;
  progress.asked_ns = now;
  if (!launch.interrupted(launch.asker)) return false;
  fail(launch, Failure::aborted, worker, -1, -1, -1, 0, 0);
  return true;
}

// False when the step ends early.
inline bool await(const Launch& launch, const WaitFor& wait, uint64_t step, int worker, const TaskEntry& task,
                  Fetcher& fetcher, Progress& progress) {
  const uint64_t target = step * wait.threshold;
  const uint64_t& count = launch.events[wait.event].value;
  // About 10 us of spinning, since tasks are short. Then others may have the processor: perhaps the one waited for.
  constexpr uint32_t kSpins = 200;
  for (uint32_t spin = 0; protocol::load_acquire(count) < target; ++spin) {
    if (aborted(launch)) return false;
    if (spin < kSpins) {
      fetcher.fetch_some();
      ARK_PAUSE();
      continue;
    }
    // A collective may take long: no need for a processor's time.
    if (spin < 20 * kSpins) {
      sched_yield();
    } else {
      const timespec pause{0, 50'000};
      nanosleep(&pause, nullptr);
    }
    if (interrupted(launch, worker, progress)) return false;
    const Report& report = *launch.report;
    if (protocol::load_acquire(report.in_collective) != 0) continue;
    const uint64_t collectives = protocol::load_relaxed(report.collective_ns) - progress.collective_ns;
    if (progress.deadline_ns != 0 && now_ns() > progress.deadline_ns + collectives) {
      fail(launch, Failure::deadline, worker, task.task, task.stage, wait.event,
           static_cast<int64_t>(protocol::load_relaxed(count)), static_cast<int64_t>(target));
      return false;
    }
  }
  return true;
}

// One step. False when it ends early. Stamps cost a clock's reading at each turn; without them the loop has no trace of
// them.
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
