// The loop kernel: one block per SM runs its queue of tasks from the plan's tables, once per step.
//
// All threads run a task together: wait for its events, call its function, signal its events. Before waiting they issue
// the prefetches of later tasks' parameters to the second-level cache, as listed in the plan's tables
// (csrc/compiler/emit/common/emit_tables.hpp), so that memory streams while tasks wait for each other. Small results
// may be polled instead of awaited (packets.cuh).
#pragma once

#include "cuda/loop/event.cuh"
#include "cuda/loop/hinted.cuh"
#include "cuda/loop/lookahead.cuh"

namespace ark::loop {

// Memory order. A task's stores precede the barrier sync(), after which one thread signals the task's events by a
// release at GPU scope. All threads' stores happen before it, as barriers and releases are cumulative in PTX's model. A
// wait is an acquire load by one thread, and a sync() that all others pass; later loads see what was stored, also in
// the first-level cache, which an acquire invalidates. A signal is a read-modify-write, so all signals of an event form
// one release sequence. Events only grow: step s waits for s * threshold (modulo 2^32, compared by difference), so
// nothing is reset. Each worker counts steps in device memory, so a captured launch continues where the last one ended.
// The stream orders launches on it; launches that may overlap have separate memory
// (csrc/compiler/runtime/step_memory.hpp).
//
// Many steps per launch (resident mode, multi-step plans): all workers meet between steps, at an event that each one's
// last task signals, so a step sees all of the one before, as the next launch would. Each worker reads by itself
// whether the graph says stop. One worker asks whether the host does, at the start of a step, and publishes the answer
// for when all have met, so all end after the same step.
//
// No deadlock. All blocks are resident (a cooperative launch of one block per SM), so other work on the GPU can only
// delay a launch. The validator has checked that every wait can be met. Spins poll the abort word, and end after the
// launch's limit with a report. For two concurrent loop kernels of equal priority, the device starts all blocks of one
// before those of the other (tests/gpu/test_compile_streams.py). With unequal priorities, blocks of the second could be
// placed before the last ones of the first, and each would wait for SMs that the other holds. So all launches have one
// priority, whatever their stream's (LaunchMode::cooperative), also as nodes of a graph. An event between streams would
// order launches, but not replays of graphs.

struct QueueEntry {
  int tasks, task_count;  // index of the first one in the table, and their number
};

#if defined(__CUDACC__)

inline constexpr int kLine = 128;  // bytes per prefetch instruction

// What a block's threads share, and what each keeps while a task's function runs.
template <int kPointers>
struct Shared {
  Lookahead ahead;
  Bases<kPointers> bases;
  int leave;                // the launch ends early
  bool stop;                // no step follows
  int positions[kThreads];  // in the queue; one per thread, as some are still at a task that others have left
};
template <int kPointers>
ARK_LOOP Shared<kPointers>& shared() {
  __shared__ Shared<kPointers> now;
  return now;
}

// Issues prefetches of later tasks' parameters. Called by all threads. With the bulk copy engine (compute capability
// 9.0) one warp issues them and continues. It takes multiples of 16 bytes: those that hold a run.
ARK_LOOP bool fetches(int self) {
#if __CUDA_ARCH__ >= 900
  return self / 32 == kWarps / 4;
#else
  return true;
#endif
}
#if __CUDA_ARCH__ >= 900
template <bool kHinted>
ARK_LOOP void prefetch_run(const char* from, const LoadEntry& load) {
  const auto before = static_cast<uint32>(bits_as<int64_t>(from) & 15);
  const uint32 bytes = (before + static_cast<uint32>(load.bytes) + 15) & ~15u;
  if constexpr (kHinted) {
    if (load.cache != static_cast<int>(Cache::normal)) {
      const uint64 policy = load.cache == static_cast<int>(Cache::evict_last) ? cache_policy<Cache::evict_last>()
                                                                              : cache_policy<Cache::evict_first>();
      asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(from - before), "r"(bytes),
                   "l"(policy));
      return;
    }
  }
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from - before), "r"(bytes));
}
#endif
template <bool kHinted>
ARK_LOOP void fetch(int self, char* const* bases, const LoadEntry* loads, int count) {
#if __CUDA_ARCH__ >= 900
  // Address and size take longer to find than the engine takes to begin, so each load has its own lane. Loads of
  // several runs follow, a lane for each run.
  ARK_ROLLED for (int first = 0; first < count; first += 32) {
    const int mine = first + self % 32;
    const bool there = mine < count;
    if (there && loads[mine].rows == 1) prefetch_run<kHinted>(address_of(bases, loads[mine].operand), loads[mine]);
    ARK_ROLLED for (uint32 several = __ballot_sync(~0u, there && loads[mine].rows > 1); several != 0;
                    several &= several - 1) {
      const LoadEntry& load = loads[first + __ffs(static_cast<int>(several)) - 1];
      const char* const from = address_of(bases, load.operand);
      ARK_ROLLED for (int row = self % 32; row < load.rows; row += 32)
          prefetch_run<kHinted>(from + row * load.stride, load);
    }
  }
#else
  ARK_ROLLED for (int n = 0; n < count; ++n) {
    const LoadEntry& load = loads[n];
    const char* const from = address_of(bases, load.operand);
    const uint32 lines = static_cast<uint32>((load.bytes + kLine - 1) / kLine);
    for (uint32 i = static_cast<uint32>(self); i < lines * static_cast<uint32>(load.rows); i += kThreads)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i / lines * load.stride + i % lines * kLine));
  }
#endif
}

// Returns when all of a task's events have been signalled, or false if the launch ends early. Each event has its own
// thread, so that the waits run concurrently. Without events there is no barrier: the last task ended with one.
ARK_LOOP bool await_all(int self, const TaskEntry& task, const TaskSlot& slot) {
  if (task.wait_count == 0) return true;
  const WaitFor* const waits = in_slot(slot.waits, kSlotWaits, worker().waits, task.waits, task.wait_count);
  bool late = false;
  ARK_ROLLED for (int i = self; i < task.wait_count; i += kThreads) late |= !await(waits[i], worker().step, task);
  return !sync_any(late);
}

// One warp signals, a different one from that which waits for the next task's events, since a release takes time.
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

// The arguments for a task's function.
struct Turn {
  int function;  // kStepDone, kLeave: no function; from Plan::kFunctions on: variants for misaligned operands
  Context context;
  Operands operands;
};
inline constexpr int kStepDone = -1, kLeave = -2;

template <class Plan, int kPointers>
ARK_LOOP Prefetcher<Plan> prefetcher_of(int self) {
  Shared<kPointers>& here = shared<kPointers>();
  return {here.ahead, here.bases.at, self, read_now(worker().task_count)};
}

// Whether this is the thread that exchanges the step's state with the host.
template <class Plan>
ARK_LOOP bool leads(int self) {
  return read_now(worker().number) == Plan::kLeader && self == 0;
}

// Records the number of steps.
template <class Plan>
ARK_LOOP void end_launch(int self) {
  if (self != 0) return;
  const LaunchHead& head = *worker().head;
  const uint32 step = read_now(worker().step);
  head.steps[read_now(worker().number) * kEventStride] = step;
  if (Plan::kClosing >= 0 && leads<Plan>(self)) write_now(head.report->steps, step - read_now(worker().before));
}

// Ends the task whose function has returned, and returns the next one when it may run. After the last task of a single
// step it ends the launch, so that threads need not meet again or keep any state for it.
//
// Not inlined, like the tasks' functions, which each need all registers: the loop that calls them keeps none.
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

// Returns false if the launch ends early.
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
    if (thread_anew() == 0) write_now(worker().step, step + 1);  // tasks read it after the next sync()
  }
  end_launch<Plan>(thread_anew());
}

#endif

}  // namespace ark::loop
