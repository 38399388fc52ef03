// The Work of a collective or of a send/recv, and the Executor that runs a group's collectives in order.
//
// A collective is a blocking body. A synchronous call runs it at once on the calling thread; an asynchronous one is
// queued for a progress thread, and whoever waits may run the queue itself. One body of a group runs at a time, in the
// order of issue. Progress threads are leader and followers: the one that has finished a body lets another take the
// next before it runs the first one's callbacks, so a callback may itself issue a collective of the group and wait.
// Threads start with the first asynchronous call and sleep on a condition variable when there is nothing to do.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "health/group_health.hpp"

namespace ark {

class Executor;

class WorkArk : public c10d::Work {
 public:
  WorkArk(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Executor> executor);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override { return sequence; }

  bool done() const { return done_.load(std::memory_order_acquire); }
  // Runs the body (once). Does not run callbacks: settle() does, without locks held.
  void execute();
  void finish(std::exception_ptr error);
  void settle();
  // The callbacks to run, for whoever must not run them himself; empty when nobody asked for a future.
  std::function<void()> take_settlement();
  std::pair<Clock::time_point, Clock::time_point> times() const { return {started_, finished_}; }

  // Set before the work is handed out.
  const char* name = "";
  uint64_t sequence = 0;
  std::function<void(WorkArk&)> body;                               // collectives
  std::function<bool(Clock::time_point)> wait_elsewhere;            // send/recv: who makes progress for it
  std::function<void(const WorkArk&, std::exception_ptr)> on_done;  // flight record, completion hook
  std::function<void()> on_abort;
  std::function<void()> poll;           // carried send/recv: looks whether it is done
  std::function<void()> need_progress;  // ... and makes it progress without a waiter
  int source_rank = -1;

 private:
  const std::vector<at::Tensor> outputs_;
  const std::shared_ptr<Executor> executor_;
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
  c10::intrusive_ptr<c10::ivalue::Future> future_, future_result_;
  bool settled_ = false;
  Clock::time_point started_{}, finished_{};
};

// Makes `work` stand for other works: it is done when all of them are, and fails with the first that failed.
// `on_success` runs once before it finishes.
void follow(const c10::intrusive_ptr<WorkArk>& work, std::vector<c10::intrusive_ptr<c10d::Work>> parts,
            std::function<void()> on_success, const std::shared_ptr<Executor>& executor);

class Executor : public std::enable_shared_from_this<Executor> {
 public:
  using Ptr = c10::intrusive_ptr<WorkArk>;
  // Numbers the work (`number` runs under the lock, in the order of issue), then runs or queues it.
  void submit(const Ptr& work, bool async, const std::function<void(WorkArk&)>& number);
  // Waits for the work, running the queue on this thread when `may_run`; false when `until` came first.
  bool await(WorkArk& work, Clock::time_point until, bool may_run);
  // Runs `task` on a progress thread: for callbacks of works that finish on a thread that must not run them.
  void defer(std::function<void()> task);
  // Waits until the queue is empty or `until`; true when empty.
  bool drain(Clock::time_point until);
  void notify();  // some work finished elsewhere
  void stop();    // no more threads; queued works stay for their waiters

 private:
  void run_front(std::unique_lock<std::mutex>& lock);
  void ensure_thread();
  void thread_main();
  void released();

  std::mutex mutex_;
  std::condition_variable ready_;    // progress threads
  std::condition_variable changed_;  // waiters
  std::deque<Ptr> queue_;
  std::deque<std::function<void()>> deferred_;
  bool running_ = false;
  bool stopping_ = false;
  int idle_ = 0;
  int waiting_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace ark
