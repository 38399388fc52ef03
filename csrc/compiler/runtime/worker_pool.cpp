// The process's pools and their threads. See worker_pool.hpp for the memory order.
#include "compiler/runtime/worker_pool.hpp"

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "cpu/wait.hpp"
#include "util/start_thread.hpp"

namespace ark::compiler {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(100);

// Spins until `done` or for at most kSpin, and returns whether it is done. Soon yields between polls: with fewer
// processors than threads, the awaited thread may need this processor.
template <class Done>
bool spin_until(Done&& done) {
  for (int i = 0; i < 200; ++i) {
    if (done()) return true;
    ARK_PAUSE();
  }
  const auto end = Clock::now() + kSpin;
  do {
    if (done()) return true;
    ::sched_yield();
  } while (Clock::now() < end);
  return done();
}

}  // namespace

// Idle pools. Never destroyed: threads may sleep in them at process exit.
struct WorkerPool::Registry {
  const pid_t process = ::getpid();
  std::mutex mutex;
  std::vector<std::unique_ptr<WorkerPool>> idle;
};

WorkerPool::Registry& WorkerPool::registry() {
  static std::atomic<Registry*> current{nullptr};
  Registry* mine = current.load(std::memory_order_acquire);
  if (mine != nullptr && mine->process == ::getpid()) return *mine;
  // In a forked child, leave the parent's registry alone: its mutex may have been held at the fork.
  auto* made = new Registry;
  if (current.compare_exchange_strong(mine, made, std::memory_order_acq_rel)) return *made;
  delete made;
  return *mine;
}

void WorkerPool::run(int workers, Body body, void* argument) {
  if (workers <= 1) {
    body(argument, 0);
    return;
  }
  Registry& all = registry();
  std::unique_ptr<WorkerPool> pool;
  {
    const std::lock_guard lock(all.mutex);
    if (!all.idle.empty()) {
      pool = std::move(all.idle.back());
      all.idle.pop_back();
    }
  }
  if (pool == nullptr) pool = std::make_unique<WorkerPool>();
  struct GiveBack {
    Registry& all;
    std::unique_ptr<WorkerPool>& pool;
    ~GiveBack() {
      const std::lock_guard lock(all.mutex);
      all.idle.push_back(std::move(pool));
    }
  } give_back{all, pool};
  pool->grow(workers - 1);
  pool->run_here(workers, body, argument);
}

void WorkerPool::grow(int threads) {
  for (; threads_ < threads; ++threads_)
    start_thread("a worker of a compiled region", [shared = shared_, worker = threads_ + 1,
                                                   seen = shared_->generation.load()] {
      serve(*shared, worker, seen);
    }).detach();
}

void WorkerPool::run_here(int workers, Body body, void* argument) {
  Shared& shared = *shared_;
  shared.body = body;
  shared.argument = argument;
  shared.workers = workers;
  shared.finished.store(0, std::memory_order_relaxed);
  shared.generation.fetch_add(1, std::memory_order_release);
  shared.generation.notify_all();
  body(argument, 0);
  // Threads beyond the job's workers report too: the job may not change while they read it.
  auto done = [&] { return shared.finished.load(std::memory_order_acquire) == threads_; };
  if (spin_until(done)) return;
  for (int seen = shared.finished.load(std::memory_order_acquire); seen != threads_;
       seen = shared.finished.load(std::memory_order_acquire))
    shared.finished.wait(seen, std::memory_order_acquire);
}

// `seen` is the generation before this thread's first job.
void WorkerPool::serve(Shared& shared, int worker, uint32_t seen) {
  for (;;) {
    auto fresh = [&] { return shared.generation.load(std::memory_order_acquire) != seen; };
    if (!spin_until(fresh))
      while (!fresh()) shared.generation.wait(seen, std::memory_order_acquire);
    ++seen;  // no job starts before this thread has reported the last one
    if (worker < shared.workers) shared.body(shared.argument, worker);
    shared.finished.fetch_add(1, std::memory_order_release);
    shared.finished.notify_all();
  }
}

}  // namespace ark::compiler
