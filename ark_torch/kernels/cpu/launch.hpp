// The parts of a launch of the loop: what the host fills in (Launch) and reads back (Report), the tables of the
// generated source, and the functions that tasks may call: errors, collectives, operands' addresses.
#pragma once

#include <time.h>

#include "cpu/types.hpp"
#include "protocol/atomics.hpp"

namespace ark::cpu {

// The version of everything here that host and generated source must agree on.
inline constexpr uint32_t kAbi = 4;

struct alignas(64) EventCount {
  uint64_t value;
};

enum class Failure : uint32_t {
  none,
  aborted,          // the caller asked to stop
  deadline,         // a wait took too long: `task`, `event`, `worker`
  index_too_large,  // an index out of range: `stage`, `value`, `limit`, `dimension`
  collective,       // the host's collective failed, and the host has the reason: `stage`
};

// Why a step ended early. The first worker to fail takes `claimed`, fills in the rest and releases `failure`.
struct alignas(64) Report {
  uint32_t abort;    // all workers leave once it is not 0
  uint32_t claimed;  // by worker + 1
  uint32_t failure;
  int32_t worker, task, stage, event, dimension;
  int64_t value, limit;
  // Whether worker 0 is in a collective, which may wait for its peers as long as its group allows, and the time spent
  // in this step's finished collectives.
  uint32_t in_collective;
  uint64_t collective_ns;
  uint64_t steps;  // done by worker 0, and so by all if nothing failed
};

// When a worker reached a task, began it (after its waits) and ended it, by CLOCK_MONOTONIC.
struct Stamp {
  uint64_t came_ns, begin_ns, end_ns;
};

struct Launch {
  uint32_t abi;
  uint32_t workers;
  const void* const* inputs;
  void* const* outputs;
  char* arena;
  char* own;  // worker w's part is at own + w * own_stride
  int64_t own_stride;
  char* scratch;  // the same
  int64_t scratch_stride;
  EventCount* events;
  Report* report;
  // Of the first `stamped` steps; nullptr: none.
  Stamp* stamps;        // by step and task
  uint64_t* wait_ends;  // by step and index in the table of waits, which has `waits` entries; set if stamps is
  uint64_t stamped, waits;
  uint64_t step;        // from 1: the first of this launch
  uint64_t steps;       // maximum; 1 if the plan is not multi-step
  uint64_t timeout_ns;  // for all waits of a step together; 0: no limit
  // Runs the collective of a graph node on the calling thread. Returns false if it failed.
  bool (*collective)(void* host, int32_t node, const void* input, void* output);
  void* host;
  // Whether to end early, polled on the calling thread in resident mode. nullptr: never.
  bool (*interrupted)(void* asker);
  void* asker;
};

// What a task's function may need besides its operands.
struct Context {
  const Launch* launch;
  char* scratch;
  bool* stop;  // the worker's own: no step follows
  int32_t worker, task, stage;
};

// The address of an operand.
struct Operand {
  enum Base : uint32_t { input, output, arena, own };
  uint32_t base;
  uint32_t index;  // among inputs or outputs
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
  int32_t operands, operand_count;  // index of the first one in the table, and their number
  int32_t waits, wait_count;
  int32_t carried, carried_count;  // waits for the step before
  int32_t signals, signal_count;
};

// What a waiting worker may prefetch: `rows` runs of `bytes`, `stride` apart, for the task at `position` of its queue.
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

// The generated source's description of itself.
struct PlanInfo {
  uint32_t abi;
  uint32_t workers, events, tasks;
  int64_t scratch_bytes;  // per worker
};

struct Tables {
  const QueueEntry* queues;
  const Operand* operands;
  const WaitFor* waits;
  const int32_t* signals;
  int64_t fetch_ahead;  // bytes
  uint64_t tasks;       // in all queues
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

// Reports to the host why this step ends early, unless another worker did, and makes all workers leave.
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

// Returns whether the index is valid for that dimension of a table. `given` is the user's value, for the message.
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
