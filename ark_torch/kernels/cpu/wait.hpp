// A worker's wait for an event, during which it prefetches what its next tasks read. Every wait is bounded: it spins,
// then yields its processor, checks the abort word each time, and ends at the deadline with a report of who waited and
// for what. The first report wins and raises the abort word, so that all workers leave.
#pragma once

#include <sched.h>
#include <time.h>

#include "cpu/launch.hpp"

#if defined(__x86_64__) || defined(__i386__)
#define ARK_PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define ARK_PAUSE() asm volatile("yield")
#else
#define ARK_PAUSE() ((void)0)
#endif

namespace ark::cpu {

// Prefetches a queue's loads ahead of its tasks, a few cache lines at a time, while there is nothing else to do.
class Fetcher {
 public:
  Fetcher(const Launch& launch, const QueueEntry& queue, int worker, int64_t ahead)
      : launch_(launch), queue_(queue), worker_(worker), ahead_(ahead) {}

  // Skips loads of tasks before `position`, which are no longer useful. The budget restarts with each task.
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

// A worker's progress.
struct Progress {
  uint64_t step;           // from 1
  uint64_t deadline_ns;    // of this step, on CLOCK_MONOTONIC; 0: none
  uint64_t collective_ns;  // time that collectives had taken when the step began
  uint64_t asked_ns;       // when the host was last asked whether to end
};

// Asks the host, from worker 0 only and rarely, since the host may need a lock to answer.
inline bool interrupted(const Launch& launch, int worker, Progress& progress) {
  if (launch.interrupted == nullptr || worker != 0) return false;
  const uint64_t now = now_ns();
  if (now < progress.asked_ns + 50'000'000u) return false;
  progress.asked_ns = now;
  if (!launch.interrupted(launch.asker)) return false;
  fail(launch, Failure::aborted, worker, -1, -1, -1, 0, 0);
  return true;
}

// Returns false if the step ends early.
inline bool await(const Launch& launch, const WaitFor& wait, uint64_t step, int worker, const TaskEntry& task,
                  Fetcher& fetcher, Progress& progress) {
  const uint64_t target = step * wait.threshold;
  const uint64_t& count = launch.events[wait.event].value;
  // Spin for about 10 us, since tasks are short. Then yield, perhaps to the thread that is waited for.
  constexpr uint32_t kSpins = 200;
  for (uint32_t spin = 0; protocol::load_acquire(count) < target; ++spin) {
    if (aborted(launch)) return false;
    if (spin < kSpins) {
      fetcher.fetch_some();
      ARK_PAUSE();
      continue;
    }
    // A collective may take long: stop using the processor.
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

}  // namespace ark::cpu
