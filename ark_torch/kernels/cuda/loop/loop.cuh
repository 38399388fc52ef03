// The loop kernel: one block an SM runs its queue of tasks from the plan's tables, once through each step.
//
// All threads run a task together: wait for its events, call its function, bump its events. Before they wait they ask
// for the parameters of tasks to come, as the plan's tables say (csrc/compiler/emit/common/emit_tables.hpp), to be
// brought into the second-level cache: memory streams while tasks wait for each other.
//
// Memory order. A task's stores come before the barrier sync(), behind which a thread bumps the task's events by a
// release at GPU scope: stores of all threads of the block happen before it (barriers and releases are cumulative in
// PTX's model). A wait is an acquire load by one thread and a sync() that all others pass; what they load then is what
// was stored, also past the first-level cache, which an acquire empties. A bump is a read-modify-write: all bumps of an
// event form one release sequence. Events only grow: step s waits for s * threshold (modulo 2^32, compared by their
// difference), so nothing is reset. Which step it is each worker counts for itself in device memory, so that a launch
// captured in a graph goes on where the one before ended. Launches on one stream are ordered by the stream; launches
// that may overlap have memory of their own (csrc/compiler/runtime/step_memory.hpp).
//
// Small results may be polled themselves instead (packets.cuh): for those nothing is awaited or bumped here.
//
// Many steps a launch (resident mode, multi-step plans): all workers meet between two steps, at an event that the last
// task of each bumps, so a step sees all of the one before, as the next launch would. Each worker has looked by itself
// whether the graph says stop. Whether the host does, one worker asks when it begins a step, and leaves the answer
// where the others look when they have met: all end after the same step.
//
// Nothing hangs. All blocks are resident at once (a cooperative launch of one block an SM), so work of others on the
// GPU delays a launch, or the end of it, but nobody waits for a block that cannot start. The plan's validator has found
// that every wait can be met. A spin polls the abort word, and ends after the launch's limit with a report. Two loop
// kernels at once, of one priority: the device starts all blocks of the one before those of the other, as
// tests/gpu/test_compile_streams.py saw it do. Were one of higher priority, its blocks could come before the last ones
// of a kernel that holds a part of the SMs already, and wait for those SMs in turn. So launches are of one priority,
// whatever their stream's (LaunchMode::cooperative), which a node of a graph keeps: an event between the streams would
// order launches, but not the replays of graphs.
#pragma once

#include "cuda/loop/event.cuh"
#include "cuda/loop/hinted.cuh"
#include "cuda/loop/lookahead.cuh"

namespace ark::loop {

struct QueueEntry {
  int tasks, task_count;  // first in the table, and how many
};

#if defined(__CUDACC__)

inline constexpr int kLine = 128;  // bytes that one prefetch brings

// What the threads of a block tell each other, and what each keeps for itself while a task's function runs.
template <int kPointers>
struct Shared {
  Lookahead ahead;
  Bases<kPointers> bases;
  int leave;                // the launch ends early
  bool stop;                // no step follows
  int positions[kThreads];  // in the queue; each thread's own, as some are still at a task when others have left it
};
template <int kPointers>
ARK_LOOP Shared<kPointers>& shared() {
  __shared__ Shared<kPointers> now;
  return now;
}

// Asks for what tasks to come read of parameters. By all threads. Where the bulk copy engine does it (compute
// capability 9.0) one warp tells it, a lane each piece, and goes on; it leaves out what is not 16-byte aligned, which
// is loaded in its turn.
ARK_LOOP bool fetches(int self) {
#if __CUDA_ARCH__ >= 900
  return self / 32 == kWarps / 4;
#else
  return true;
#endif
}
template <bool kHinted>
ARK_LOOP void fetch(int self, char* const* bases, const LoadEntry* loads, int count) {
  ARK_ROLLED for (int n = 0; n < count; ++n) {
    const LoadEntry& load = loads[n];
    const char* const from = address_of(bases, load.operand);
#if __CUDA_ARCH__ >= 900
    if (((bits_as<int64_t>(from) | load.bytes | load.stride) & 15) != 0) continue;
    if constexpr (kHinted) {
      if (load.cache != static_cast<int>(Cache::normal)) {
        const uint64 policy = load.cache == static_cast<int>(Cache::evict_last) ? cache_policy<Cache::evict_last>()
                                                                                : cache_policy<Cache::evict_first>();
        ARK_ROLLED for (int row = self % 32; row < load.rows; row += 32) asm volatile(
            "cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(from + row * load.stride),
            "r"(static_cast<uint32>(load.bytes)), "l"(policy));
        continue;
      }
    }
    ARK_ROLLED for (int row = self % 32; row < load.rows; row += 32) asm volatile(
        "cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + row * load.stride),
        "r"(static_cast<uint32>(load.bytes)));
#else
    const uint32 lines = static_cast<uint32>((load.bytes + kLine - 1) / kLine);
    for (uint32 i = static_cast<uint32>(self); i < lines * static_cast<uint32>(load.rows); i += kThreads)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i / lines * load.stride + i % lines * kLine));
#endif
  }
}

// Returns when all of a task's events are there; false when the launch ends early. Each is awaited by a thread of its
// own, so that they are under way together. Without any the threads need not meet: they did at the end of the task
// before.
ARK_LOOP bool await_all(int self, const TaskEntry& task, const TaskSlot& slot) {
  if (task.wait_count == 0) return true;
  const WaitFor* const waits = in_slot(slot.waits, kSlotWaits, worker().waits, task.waits, task.wait_count);
  bool late = false;
  ARK_ROLLED for (int i = self; i < task.wait_count; i += kThreads) late |= !await(waits[i], worker().step, task);
  return !sync_any(late);
}

// By one warp, and not by the one that waits for the next task's events: a release takes its time.
ARK_LOOP void bump_all(int self, const TaskEntry& task, const TaskSlot& slot) {
  if (self / 32 != kWarps / 2) return;
  const int* const signals = in_slot(slot.signals, kSlotSignals, worker().signals, task.signals, task.signal_count);
  ARK_ROLLED for (int i = self % 32; i < task.signal_count; i += 32)
      bump_event(worker().events + signals[i] * kEventStride);
}

ARK_LOOP void stamp(int self, const TaskEntry& task, unsigned long long Stamp::*when) {
  if (self != 0) return;
  if (Stamp* const stamps = worker().stamps; stamps != nullptr) stamps[task.task].*when = now_ns();
}

// What a task's function is called with.
struct Turn {
  int function;  // kStepDone, kLeave: none; from Plan::kFunctions on: those of operands that are not aligned
  Context context;
  Operands operands;
};
inline constexpr int kStepDone = -1, kLeave = -2;

template <class Plan, int kPointers>
ARK_LOOP Prefetcher<Plan> prefetcher_of(int self) {
  Shared<kPointers>& here = shared<kPointers>();
  return {here.ahead, here.bases.at, self, read_now(worker().task_count)};
}

// Whether it is the thread that asks and tells the host about steps.
template <class Plan>
ARK_LOOP bool leads(int self) {
  return read_now(worker().number) == Plan::kLeader && self == 0;
}

// Notes how many steps there were.
template <class Plan>
ARK_LOOP void end_launch(int self) {
  if (self != 0) return;
  const LaunchHead& head = *worker().head;
  const uint32 step = read_now(worker().step);
  head.steps[read_now(worker().number) * kEventStride] = step;
  if (Plan::kClosing >= 0 && leads<Plan>(self)) write_now(head.report->steps, step - read_now(worker().before));
}

// Ends the task whose function has returned, and comes to the next: it returns when that one may run. Behind the last
// one of a single step it ends the launch: threads that need not meet again keep nothing for it.
//
// A function of its own, as tasks' are, which each need all registers: the loop that calls them in turn needs none
// meanwhile.
template <class Plan, int kPointers>
static __device__ __noinline__ Turn next_task() {
  Shared<kPointers>& here = shared<kPointers>();
  const int self = thread(), last = here.positions[self], position = last + 1;
  const Prefetcher<Plan> prefetcher = prefetcher_of<Plan, kPointers>(self);
  if (last >= 0) {
    prefetcher.landed();
    if (sync_any(read_now(here.leave) != 0)) return {kLeave, {}, {}};
    const TaskEntry& ended = here.ahead.entries[last % kEntries];
    stamp(self, ended, &Stamp::end_ns);
    bump_all(self, ended, here.ahead.slots[last % 4]);
  }
  here.positions[self] = position;
  if (position >= prefetcher.count) {
    if (Plan::kClosing < 0) end_launch<Plan>(self);
    return {kStepDone, {}, {}};
  }
  const TaskEntry& task = here.ahead.entries[position % kEntries];
  const TaskSlot& slot = here.ahead.slots[position % 4];
  stamp(self, task, &Stamp::came_ns);
  if (Plan::kPackets && self == 0) *const_cast<const TaskEntry* volatile*>(&worker().task) = &task;
  prefetcher.ahead(position);
  if (fetches(self))
    fetch<Plan::kHintedLoads>(self, prefetcher.bases,
                              in_slot(slot.loads, kSlotLoads, worker().loads, task.loads, task.load_count),
                              task.load_count);
  if (!await_all(self, task, slot)) return {kLeave, {}, {}};
  stamp(self, task, &Stamp::begin_ns);
  const auto found = prefetcher.operands(position);
  return {task.function + (found.aligned ? 0 : Plan::kFunctions), {shared_address(&task)}, found.operands};
}

template <class Plan, int kPointers>
static __device__ __noinline__ void begin_step() {
  prefetcher_of<Plan, kPointers>(thread()).begin();
  shared<kPointers>().positions[thread()] = -1;
}

// False when the launch ends early.
template <class Plan, int kPointers>
ARK_LOOP bool run_step() {
  begin_step<Plan, kPointers>();
  while (true) {
    const Turn turn = next_task<Plan, kPointers>();
    const int function = uniform(turn.function);
    if (function < 0) return function == kStepDone;
    Plan::run(__shfl_sync(~0u, function, 0), turn.context, turn.operands);
  }
}

template <class Plan, int kPointers>
ARK_LOOP void run_loop(const Launch<kPointers>& launch) {
  const LaunchHead& head = launch.head;
  {
    const int number = static_cast<int>(blockIdx.x);
    const QueueEntry queue = Plan::queues()[number];
    const uint32 before = head.steps[number * kEventStride];
    shared<kPointers>().bases.fill(launch, number);
    if (thread_anew() == 0) {
      shared<kPointers>().leave = 0;
      shared<kPointers>().stop = false;
      worker() = {.head = &head,
                  .scratch = head.scratch + number * head.scratch_stride,
                  .leave = &shared<kPointers>().leave,
                  .stop = &shared<kPointers>().stop,
                  .stamps = head.stamps,
                  .events = head.events,
                  .waits = Plan::waits(),
                  .signals = Plan::signals(),
                  .loads = Plan::loads(),
                  .tasks = Plan::tasks() + queue.tasks,
                  .task_count = queue.task_count,
                  .number = number,
                  .before = before,
                  .step = before + 1,
                  .rank = head.ranks.rank};
      if (Plan::kPushes)
        ARK_UNROLL for (int rank = 0; rank < kMostRanks; ++rank) worker().packets[rank] = head.ranks.packets[rank];
    }
  }
  sync();
  while (true) {
    if (Plan::kClosing >= 0 && leads<Plan>(thread_anew()) && read_now(head.report->stop) != 0)
      write_now(head.control->last, read_now(worker().step));
    if (!run_step<Plan, kPointers>() || Plan::kClosing < 0) return;
    const uint32 step = read_now(worker().step);
    if (step - read_now(worker().before) == head.most || read_now(shared<kPointers>().stop)) break;
    const WaitFor all{Plan::kClosing, static_cast<uint32>(Plan::kClosers)};
    if (sync_any(thread_anew() == 0 && !await(all, step, *worker().tasks))) return;
    if (read_now(head.control->last) == step) break;
    if (thread_anew() == 0) write_now(worker().step, step + 1);  // which tasks ask for behind the next sync()
  }
  end_launch<Plan>(thread_anew());
}

#endif

}  // namespace ark::loop
