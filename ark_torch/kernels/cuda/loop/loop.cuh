// The loop kernel: one block an SM runs its queue of tasks from the plan's tables, once through each step.
//
// All threads run a task together: wait for its events, call its function, bump its events. Before they wait they ask
// for the parameters of tasks to come, in the order of the queue and at most a plan's `fetch_ahead` bytes before their
// use, to be brought into the second-level cache: memory streams while tasks wait for each other.
//
// Memory order. A task's stores come before the barrier sync(), behind which a thread bumps the task's events by a
// release at GPU scope: stores of all threads of the block happen before it (barriers and releases are cumulative in
// PTX's model). A wait is an acquire load by one thread and a sync() that all others pass; what they load then is what
// was stored, also past the first-level cache, which an acquire empties. A bump is a read-modify-write: all bumps of an
// event form one release sequence. Events only grow: step s waits for s * threshold (modulo 2^32, compared by their
// difference), so nothing is reset. Which step it is each worker counts for itself in device memory, so that a launch
// captured in a graph goes on where the one before ended. Launches on one stream are ordered by the stream; launches
// that may overlap have memory of their own (csrc/plan/cuda_loop.hpp).
//
// Nothing hangs. All blocks are resident at once (a cooperative launch of one block an SM), so work of others on the
// GPU delays a launch, or the end of it, but nobody waits for a block that cannot start. The plan's validator has found
// that every wait can be met. A spin polls the abort word, and ends after the launch's limit with a report. Two loop
// kernels at once, on streams of one priority: the device starts all blocks of the one before those of the other, as
// tests/gpu/test_compile.py saw it do. On streams of different priorities each could hold a part of the SMs, and both
// would end by that limit.
#pragma once

#include "cuda/loop/launch.cuh"

namespace ark::loop {

struct QueueEntry {
  int tasks, task_count;  // first in the table, and how many
  int loads, load_count;
};

// What is fetched ahead: `rows` pieces of `bytes`, `stride` apart, for the task at `position` of its queue.
struct LoadEntry {
  Operand operand;
  int position, rows;
  long long bytes, stride;
};

#if defined(__CUDACC__)

inline constexpr int kLine = 128;  // bytes that one prefetch brings

ARK_LOOP uint32 load_event(const uint32* word) {
  uint32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
ARK_LOOP void bump_event(uint32* word) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(word) : "memory");
}

// False when the launch ends early. By one thread.
static __device__ __noinline__ bool wait_long(const LaunchHead& head, const uint32* word, uint32 target, int worker,
                                              int task, int stage, int event) {
  const unsigned long long began = now_ns();
  while (true) {
    for (int turn = 0; turn < 256; ++turn)
      if (static_cast<int>(load_event(word) - target) >= 0) return true;
    if (aborted(head)) return false;
    if (head.timeout_ns != 0 && now_ns() - began > head.timeout_ns) {
      fail(head, Failure::deadline, worker, task, stage, event, load_event(word), target, 0);
      return false;
    }
  }
}

ARK_LOOP bool await(const LaunchHead& head, const WaitFor& wait, uint32 step, int worker, const TaskEntry& task) {
  const uint32* word = head.events + wait.event * kEventStride;
  const uint32 target = step * wait.threshold;
  for (int turn = 0; turn < 64; ++turn)
    if (static_cast<int>(load_event(word) - target) >= 0) return true;
  return wait_long(head, word, target, worker, task.task, task.stage, wait.event);
}

// What the threads of a block tell each other.
struct Shared {
  int leave;  // the launch ends early
  bool stop;  // no step follows
};

// Walks the loads of one step ahead of its tasks. Every thread keeps the same account.
template <class Plan>
struct Fetcher {
  const LaunchHead& head;
  char* const* pointers;
  const QueueEntry& queue;
  int next = 0, behind = 0;  // load to ask for; first one whose task has not begun
  long long in_advance = 0;  // bytes of those between

  ARK_LOOP void fetch(int position) {
    while (behind < next && Plan::loads()[queue.loads + behind].position < position) {
      const LoadEntry& old = Plan::loads()[queue.loads + behind++];
      in_advance -= old.rows * old.bytes;
    }
    while (next < queue.load_count) {
      const LoadEntry& load = Plan::loads()[queue.loads + next];
      const long long bytes = load.rows * load.bytes;
      if (in_advance > 0 && in_advance + bytes > Plan::kFetchAhead) return;
      in_advance += bytes;
      ++next;
      const char* const from = address_of(head, pointers, static_cast<int>(blockIdx.x), load.operand);
      const uint32 lines = static_cast<uint32>((load.bytes + kLine - 1) / kLine);
      for (uint32 i = threadIdx.x; i < lines * static_cast<uint32>(load.rows); i += kThreads)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i / lines * load.stride + i % lines * kLine));
    }
  }
};

template <class Plan>
ARK_LOOP bool run_step(const LaunchHead& head, char* const* pointers, const QueueEntry& queue, uint32 step,
                       Shared& shared) {
  const int worker = static_cast<int>(blockIdx.x);
  Fetcher<Plan> fetcher{head, pointers, queue};
  for (int position = 0; position < queue.task_count; ++position) {
    const TaskEntry task = Plan::tasks()[queue.tasks + position];
    Stamp* const stamp = head.stamps == nullptr || thread() != 0 ? nullptr : head.stamps + task.task;
    if (stamp != nullptr) stamp->came_ns = now_ns();
    fetcher.fetch(position);
    // Each wait by a thread of its own: all are under way together.
    const int waits = task.wait_count + task.carried_count;
    for (int i = thread(); i < waits; i += kThreads) {
      const bool before = i >= task.wait_count;
      const WaitFor wait = Plan::waits()[before ? task.carried + i - task.wait_count : task.waits + i];
      if (!await(head, wait, before ? step - 1 : step, worker, task)) *const_cast<volatile int*>(&shared.leave) = 1;
    }
    sync();
    if (*const_cast<volatile int*>(&shared.leave) != 0) return false;
    if (stamp != nullptr) stamp->begin_ns = now_ns();
    const Context context{
        &head, head.scratch + worker * head.scratch_stride, &shared.leave, &shared.stop, worker, task.task, task.stage,
        step};
    const Operands operands{Plan::operands() + task.operands, &head, pointers, worker};
    Plan::run(task.function, context, operands, task.begin, task.end);
    sync();
    if (stamp != nullptr) stamp->end_ns = now_ns();
    if (*const_cast<volatile int*>(&shared.leave) != 0) return false;
    for (int i = thread(); i < task.signal_count; i += kThreads)
      bump_event(head.events + Plan::signals()[task.signals + i] * kEventStride);
  }
  return true;
}

template <class Plan, int kPointers>
ARK_LOOP void run_loop(const Launch<kPointers>& launch) {
  __shared__ Shared shared;
  const LaunchHead& head = launch.head;
  const int worker = static_cast<int>(blockIdx.x);
  const QueueEntry queue = Plan::queues()[worker];
  if (threadIdx.x == 0) shared = {};
  __syncthreads();
  uint32* const count = head.steps + worker * kEventStride;
  const uint32 step = *count + 1;
  const bool done = run_step<Plan>(head, launch.pointers, queue, step, shared);
  if (done && thread() == 0) *count = step;
}

#endif

}  // namespace ark::loop
