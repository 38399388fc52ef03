// Events between tasks of a loop kernel: one word each, which only grows. loop.cuh explains how they order memory.
#pragma once

#include "cuda/loop/failure.cuh"

#if defined(__CUDACC__)

namespace ark::loop {

ARK_LOOP uint32 load_event(const uint32* word) {
  uint32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
ARK_LOOP void bump_event(uint32* word) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(word) : "memory");
}

// Returns false if the launch ends early. Called by one thread.
static __device__ __noinline__ bool wait_long(const LaunchHead& head, const uint32* word, uint32 target, int number,
                                              int task, int stage, int event) {
  const unsigned long long began = now_ns();
  while (true) {
    for (int turn = 0; turn < 256; ++turn)
      if (static_cast<int>(load_event(word) - target) >= 0) return true;
    if (aborted(head)) return false;
    if (head.timeout_ns != 0 && now_ns() - began > head.timeout_ns) {
      fail(head, Failure::deadline, number, task, stage, event, load_event(word), target, 0);
      return false;
    }
  }
}

ARK_LOOP bool await(const WaitFor& wait, uint32 step, const TaskEntry& task) {
  const Worker& here = worker();
  const uint32* word = here.events + wait.event * kEventStride;
  const uint32 target = step * wait.threshold;
  ARK_ROLLED for (int turn = 0; turn < 64; ++turn) if (static_cast<int>(load_event(word) - target) >= 0) return true;
  return wait_long(*here.head, word, target, here.number, task.task, task.stage, wait.event);
}

}  // namespace ark::loop

#endif
