// The queue of a group's collectives, and the threads and waiters that run it.
#include "process_group/executor.hpp"

#include "process_group/group_core.hpp"
#include "util/start_thread.hpp"

namespace ark {

namespace {

constexpr size_t kMostThreads = 16;  // for nested callbacks that block; beyond that, waiters make progress

}  // namespace

void Executor::submit(const Ptr& work, bool async, GroupCore& core, FlightEntry& entry) {
  std::unique_lock lock(mutex_);
  if (async) ensure_thread();  // first, because it may throw before anything is numbered
  core.number(work->operation, entry);
  if (!async && !running_ && queue_.empty()) {
    running_ = true;
    lock.unlock();
    work->execute();
    lock.lock();
    running_ = false;
    released();
    lock.unlock();
    work->settle();
    return;
  }
  queue_.push_back(work);
  ready_.notify_one();
}

// Requires the lock. Called when another thread may run the next body.
void Executor::released() {
  if (!queue_.empty()) ready_.notify_one();
  if (waiting_ > 0) changed_.notify_all();
}

void Executor::run_front(std::unique_lock<std::mutex>& lock) {
  Ptr work = std::move(queue_.front());
  queue_.pop_front();
  running_ = true;
  lock.unlock();
  work->execute();
  lock.lock();
  running_ = false;
  // Callbacks may block, so another thread must be free for the rest of the queue.
  if (!queue_.empty() && idle_ == 0 && !threads_.empty()) ensure_thread();
  released();
  lock.unlock();
  work->settle();
  work.reset();  // frees its tensors outside the lock
  lock.lock();
}

bool Executor::await(WorkArk& work, Clock::time_point until, bool may_run) {
  std::unique_lock lock(mutex_);
  ++waiting_;
  bool finished = true;
  while (!work.done()) {
    if (may_run && !running_ && !queue_.empty()) {
      run_front(lock);
      continue;
    }
    if (!may_run && !queue_.empty()) ensure_thread();
    if (until == Clock::time_point::max()) {
      changed_.wait(lock);
    } else if (changed_.wait_until(lock, until) == std::cv_status::timeout && !work.done()) {
      finished = false;
      break;
    }
  }
  --waiting_;
  return finished;
}

void Executor::defer(std::function<void()> task) {
  std::lock_guard lock(mutex_);
  ensure_thread();
  deferred_.push_back(std::move(task));
  ready_.notify_one();
}

bool Executor::drain(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  ++waiting_;
  while (running_ || !queue_.empty()) {
    if (!running_) {
      run_front(lock);
    } else if (changed_.wait_until(lock, until) == std::cv_status::timeout) {
      break;
    }
  }
  --waiting_;
  return !running_ && queue_.empty();
}

// Requires the lock. Makes sure that a thread is, or will be, free to take the front of the queue.
void Executor::ensure_thread() {
  if (idle_ > 0 || stopping_ || threads_.size() >= kMostThreads) return;
  threads_.push_back(
      start_thread("a progress thread of the process group", [self = shared_from_this()] { self->thread_main(); }));
  ++idle_;  // counted here, so that a burst of calls starts only one thread
}

void Executor::thread_main() {
  std::unique_lock lock(mutex_);
  for (;;) {
    ready_.wait(lock, [&] { return stopping_ || !deferred_.empty() || (!running_ && !queue_.empty()); });
    if (stopping_) return;
    --idle_;
    if (!deferred_.empty()) {
      auto task = std::move(deferred_.front());
      deferred_.pop_front();
      if (!deferred_.empty()) ensure_thread();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    } else {
      run_front(lock);
    }
    ++idle_;
  }
}

void Executor::stop() {
  std::vector<std::thread> threads;
  std::deque<std::function<void()>> deferred;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    threads.swap(threads_);
    deferred.swap(deferred_);
  }
  ready_.notify_all();
  changed_.notify_all();
  for (auto& task : deferred) task();
  for (std::thread& thread : threads) {
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();  // one of the group's own callbacks destroyed it
    } else {
      thread.join();
    }
  }
}

}  // namespace ark
