// How a launch ends early: an index out of range, a wait that took too long, a lost peer. The first thread to find one
// reports it to the host (Report), and all workers leave through the abort word.
//
// Memory order: the thread that claims the report by a system-scope compare-and-swap is its only writer, and releases
// `failure`, which the host acquires (csrc/compiler/runtime/step_memory.cpp). The abort word is polled and orders
// nothing.
#pragma once

#include "cuda/loop/task.cuh"
#if defined(__CUDACC__)
#include "protocol/atomics.hpp"

namespace ark::loop {

ARK_LOOP unsigned long long now_ns() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Whether this waiting thread is the one of its block to poll host memory, which one does every 16 us. If all threads
// of all blocks polled, they would occupy the bus so long that steps stay slow (docs/measurements.md).
ARK_LOOP bool is_to_look() {
  uint32* const looked = &worker().looked;
  const uint32 now = static_cast<uint32>(now_ns() >> 14), before = *const_cast<volatile uint32*>(looked);
  return now != before && atomicCAS(looked, before, now) == before;
}

ARK_LOOP bool aborted(const LaunchHead& head) {
  return *const_cast<const volatile uint32*>(&head.control->abort) != 0;
}

// Reports to the host why this launch ends early, unless another thread did, and makes all workers leave.
static __device__ __noinline__ void report(const LaunchHead& head, Failure failure, int worker, int task, int stage,
                                           int event, int64_t value, int64_t limit, int dimension) {
  Report& report = *head.report;
  if (atomicCAS_system(&report.claimed, 0u, static_cast<uint32>(worker) + 1) == 0) {
    report.worker = worker;
    report.task = task;
    report.stage = stage;
    report.event = event;
    report.dimension = dimension;
    report.value = value;
    report.limit = limit;
    protocol::store_release(report.failure, static_cast<uint32>(failure));
    __threadfence_system();
  } else {
    // The first one's report must be complete before anyone ends the context.
    const unsigned long long began = now_ns();
    while (protocol::load_acquire(report.failure) == 0 && now_ns() - began < 10'000'000) {
    }
  }
  *const_cast<volatile uint32*>(&head.control->abort) = 1;
}

// The same if no results may be used.
static __device__ __noinline__ void fail(const LaunchHead& head, Failure failure, int worker, int task, int stage,
                                         int event, int64_t value, int64_t limit, int dimension) {
  report(head, failure, worker, task, stage, event, value, limit, dimension);
  // End the context, like a failed assertion of an eager kernel: results that were never computed must not be mistaken
  // for valid ones. Calling an unknown function would make ptxas serialize wgmma (tile_group.cuh), so kernels with warp
  // groups trap instead.
#if defined(ARK_LOOP_TRAPS)
  asm volatile("trap;");
#else
  __assertfail(
      "an index is out of range, a condition does not hold, or a wait took too long; the next call of the region says "
      "which",
      "a region compiled by ark_torch", static_cast<unsigned>(stage), "", 1);
#endif
}

// For the task whose function calls it.
static __device__ __noinline__ void refuse(Context context, int64_t value, int64_t limit, int dimension) {
  const Worker& here = worker();
  const TaskEntry& task = context.task();
  *const_cast<volatile int*>(here.leave) = 1;
  fail(*here.head, Failure::index_too_large, here.number, task.task, task.stage, -1, value, limit, dimension);
}

// Returns whether the index is valid for that dimension of a table. `given` is the user's value, for the message.
ARK_LOOP bool index_fits(const Context& context, int64_t index, int64_t limit, int64_t given, int dimension) {
  if (static_cast<uint64>(index) < static_cast<uint64>(limit)) return true;
  refuse(context, given, limit, dimension);
  return false;
}
ARK_LOOP bool index_fits(const Context& context, int64_t index, int64_t limit) {
  return index_fits(context, index, limit, index, 0);
}

}  // namespace ark::loop

#endif
