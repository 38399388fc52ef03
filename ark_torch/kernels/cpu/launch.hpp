// What a launch of the loop is made of: what the host fills in (Launch) and reads back (Report), the tables of the
// generated source, and what a task's function may call: an error, a collective, where an operand lies.
#pragma once

#include <time.h>

#include "cpu/types.hpp"
#include "protocol/atomics.hpp"

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
  uint64_t steps;       // at most; 1 where the plan is not multi-step
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

}  // namespace ark::cpu
