// Threads that run the workers of a loop; the caller is worker 0.
//
// A pool runs one loop at a time. A caller that finds all pools busy gets a new one, so that no loop waits for another:
// with collectives inside, it could wait forever. Pools and threads are kept for later calls; a forked child starts
// without pools.
//
// Memory order: the caller writes the job, then stores the generation (release); a thread that loads it (acquire) sees
// the job and all before it. A thread finally adds to `finished` (release), which the caller loads (acquire) before it
// returns. After a job a thread spins briefly, since steps follow each other closely, then sleeps on the generation's
// futex.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace ark::compiler {

class WorkerPool {
 public:
  using Body = void (*)(void* argument, int worker);

  // Calls body(argument, w) for every w below `workers`: 0 on this thread, the others concurrently on an idle pool's
  // threads. Returns when all have returned. `body` must not throw. Throws Error(system) before any call if a thread
  // cannot be started.
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
