// The pools of this process and what their threads do, behind worker_pool.hpp.
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

// Spins until `done` or for kSpin; whether it is done. Soon it yields between looks: where processors are fewer than
// threads, who is waited for may be the one that waits for this processor.
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

// Idle pools. Never destroyed: threads may sleep in them when the process ends.
struct WorkerPool::Registry {
  const pid_t process = ::getpid();
  std::mutex mutex;
  std::vector<std::unique_ptr<WorkerPool>> idle;
};

WorkerPool::Registry& WorkerPool::registry() {
  static std::atomic<Registry*> current{nullptr};
  Registry* mine = current.load(std::memory_order_acquire);
  if (mine != nullptr && mine->process == ::getpid()) return *mine;
  // The parent's one is left as it is: its mutex may have been held when this process was forked off.
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
  // Threads beyond the job's workers report too: the job may not change under them.
  auto done = [&] { return shared.finished.load(std::memory_order_acquire) == threads_; };
  if (spin_until(done)) return;
  for (int seen = shared.finished.load(std::memory_order_acquire); seen != threads_;
       seen = shared.finished.load(std::memory_order_acquire))
    shared.finished.wait(seen, std::memory_order_acquire);
}

// `seen` is the generation before the first job of this thread.
void WorkerPool::serve(Shared& shared, int worker, uint32_t seen) {
  for (;;) {
    auto fresh = [&] { return shared.generation.load(std::memory_order_acquire) != seen; };
    if (!spin_until(fresh))
      while (!fresh()) shared.generation.wait(seen, std::memory_order_acquire);
    ++seen;  // no job begins before this thread has reported the one before
    if (worker < shared.workers) shared.body(shared.argument, worker);
    shared.finished.fetch_add(1, std::memory_order_release);
    shared.finished.notify_all();
  }
}

}  // namespace ark::compiler
