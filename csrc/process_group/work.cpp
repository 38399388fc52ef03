// Completion, futures and the order of execution. See the header for who runs what.
#include "process_group/work.hpp"

#include <ATen/core/ivalue.h>

#include "health/start_thread.hpp"
#include "process_group/translate.hpp"

namespace ark {

namespace {

constexpr size_t kMostThreads = 16;  // callbacks that block, one inside the other; beyond that waiters make progress

}  // namespace

WorkArk::WorkArk(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Executor> executor)
    : Work(rank, type), outputs_(std::move(outputs)), executor_(std::move(executor)) {}

bool WorkArk::isSuccess() const {
  return done() && !error_;
}
std::exception_ptr WorkArk::exception() const {
  return done() ? error_ : nullptr;
}

int WorkArk::sourceRank() const {
  TORCH_CHECK(opType_ == c10d::OpType::RECVANYSOURCE || opType_ == c10d::OpType::RECV, "ark: [rank ", rank_,
              "] sourceRank() is for the work of a recv");
  return source_rank;
}

void WorkArk::synchronize() {
  wait();
}

bool WorkArk::wait(std::chrono::milliseconds timeout) {
  if (!done()) {
    // Without a timeout of its own the wait ends with the operation, whose deadline bounds it.
    const bool own_timeout = timeout.count() > 0;
    const auto until =
        own_timeout && timeout < std::chrono::hours(24 * 365) ? Clock::now() + timeout : Clock::time_point::max();
    const bool finished = wait_elsewhere ? wait_elsewhere(until) : executor_->await(*this, until, !own_timeout);
    if (!finished || !done()) {
      throw_torch(Error(ErrorKind::timeout,
                        "wait() gave up after " + std::to_string(timeout.count()) + " ms; the operation goes on",
                        ErrorContext{rank_, -1, name, sequence, "Wait again, wait longer, or abort the group."}));
    }
  }
  if (error_) std::rethrow_exception(error_);
  Work::synchronize();  // unregisters work that a compiled graph may hold
  return true;
}

void WorkArk::abort() {
  if (on_abort) on_abort();
}

void WorkArk::execute() {
  started_ = Clock::now();
  std::exception_ptr error;
  try {
    body(*this);
  } catch (...) {
    error = std::current_exception();
  }
  finish(error);
}

void WorkArk::finish(std::exception_ptr error) {
  finished_ = Clock::now();
  if (started_ == Clock::time_point{}) started_ = finished_;
  if (on_done) on_done(*this, error);
  error_ = error ? to_torch(error) : nullptr;
  body = nullptr;  // lets go of the tensors
  done_.store(true, std::memory_order_release);
}

bool WorkArk::isCompleted() {
  if (!done() && poll) poll();
  return done();
}

std::function<void()> WorkArk::take_settlement() {
  std::lock_guard lock(mutex_);
  settled_ = true;
  if (!future_ && !future_result_) return {};
  return [future = future_, result = future_result_, outputs = outputs_, error = error_] {
    if (future) error ? future->setError(error) : future->markCompleted(c10::IValue(outputs));
    if (result) {
      result->markCompleted(static_cast<int64_t>(error ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS));
    }
  };
}

void WorkArk::settle() {
  if (const auto settlement = take_settlement()) settlement();
}

c10::intrusive_ptr<c10::ivalue::Future> WorkArk::getFuture() {
  if (need_progress) need_progress();
  std::unique_lock lock(mutex_);
  if (!future_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (settled_) {
      const auto future = future_;
      lock.unlock();
      error_ ? future->setError(error_) : future->markCompleted(c10::IValue(outputs_));
      return future;
    }
  }
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkArk::getFutureResult() {
  std::unique_lock lock(mutex_);
  if (!future_result_) {
    future_result_ = c10::make_intrusive<c10::ivalue::Future>(c10::AnyEnumType::get());
    if (settled_) {
      future_result_->markCompleted(
          static_cast<int64_t>(error_ ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS));
    }
  }
  return future_result_;
}

float WorkArk::getDuration() const {
  TORCH_CHECK(done(), "ark: [rank ", rank_, "] getDuration() before the work is complete");
  return std::chrono::duration<float, std::milli>(finished_ - started_).count();
}

void follow(const c10::intrusive_ptr<WorkArk>& work, std::vector<c10::intrusive_ptr<c10d::Work>> parts,
            std::function<void()> on_success, const std::shared_ptr<Executor>& executor) {
  struct State {
    std::vector<c10::intrusive_ptr<c10d::Work>> parts;
    std::function<void()> on_success;
    std::once_flag once;
  };
  auto state = std::make_shared<State>();
  state->parts = std::move(parts);
  state->on_success = std::move(on_success);
  // The closures live in the work itself, so the plain pointer is good whenever they run.
  auto conclude = [raw = work.get(), state] {
    std::call_once(state->once, [&] {
      std::exception_ptr error;
      for (const auto& part : state->parts) {
        try {
          part->wait();
        } catch (...) {
          if (!error) error = std::current_exception();
        }
      }
      try {
        if (!error && state->on_success) state->on_success();
      } catch (...) {
        error = std::current_exception();
      }
      raw->finish(error);
      raw->settle();
    });
  };
  work->wait_elsewhere = [state, conclude](Clock::time_point until) {
    for (const auto& part : state->parts) {
      if (until == Clock::time_point::max()) break;  // conclude() waits
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
      try {
        part->wait(std::max(left, std::chrono::milliseconds(1)));
      } catch (...) {
        if (!part->isCompleted()) return false;
      }
    }
    conclude();
    return true;
  };
  work->poll = [state, conclude] {
    for (const auto& part : state->parts) {
      if (!part->isCompleted()) return;
    }
    conclude();
  };
  work->need_progress = [raw = work.get(), executor] {
    if (raw->done()) return;
    auto held = c10::intrusive_ptr<WorkArk>::unsafe_reclaim_from_nonowning(raw);
    executor->defer([held] { held->wait_elsewhere(Clock::time_point::max()); });
  };
}

void Executor::submit(const Ptr& work, bool async, const std::function<void(WorkArk&)>& number) {
  std::unique_lock lock(mutex_);
  if (async) ensure_thread();  // first: it may throw, and then nothing must have been numbered
  number(*work);
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

// Called with the lock held when the right to run is free again.
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
  // Callbacks may block: somebody else must be there for what is queued behind.
  if (!queue_.empty() && idle_ == 0 && !threads_.empty()) ensure_thread();
  released();
  lock.unlock();
  work->settle();
  work.reset();  // its tensors go without the lock held
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

void Executor::notify() {
  std::lock_guard lock(mutex_);
  if (waiting_ > 0) changed_.notify_all();
}

// With the lock held: makes sure that one thread is, or will be, free to take the front of the queue.
void Executor::ensure_thread() {
  if (idle_ > 0 || stopping_ || threads_.size() >= kMostThreads) return;
  threads_.push_back(
      start_thread("a progress thread of the process group", [self = shared_from_this()] { self->thread_main(); }));
  ++idle_;  // counted here, so that a burst of calls starts one thread only
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
      thread.detach();  // the group was destroyed from one of its own callbacks
    } else {
      thread.join();
    }
  }
}

}  // namespace ark
