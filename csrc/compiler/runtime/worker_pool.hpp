// Threads that wait for the workers of a loop: the caller is worker 0, these are the others.
//
// A pool runs one loop at a time. Who finds all pools busy (two threads that call two models) gets one more, so that no
// loop waits for another: with collectives inside, that could be for ever. Pools and their threads stay for the next
// call; a forked child, which has none of the threads, begins with none of the pools.
//
// Memory order. The caller writes the job, then stores the pool's generation (a release); a thread that loads the new
// generation (an acquire) sees the job and all that the caller did before. A thread's last act is to add to `finished`
// (a release), which the caller loads (an acquire) before it returns. A thread spins for a moment after a job, since
// steps follow each other closely, then sleeps on the generation's futex.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace ark::compiler {

class WorkerPool {
 public:
  using Body = void (*)(void* argument, int worker);

  // Calls body(argument, w) for every w below `workers`, 0 on this thread, the others at the same time on threads of an
  // idle pool; returns when all have. `body` throws nothing. Throws Error(system) before any call where no thread can
  // be started.
  static void run(int workers, Body body, void* argument);

 private:
  struct alignas(64) Shared {
    std::atomic<uint32_t> generation{0};
    alignas(64) std::atomic<int> finished{0};
    Body body = nullptr;
    void* argument = nullptr;
    int workers = 0;
  };
  struct Registry;

  static Registry& registry();
  void grow(int threads);
  void run_here(int workers, Body body, void* argument);
  static void serve(Shared& shared, int worker, uint32_t seen);

  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  int threads_ = 0;
};

}  // namespace ark::compiler
