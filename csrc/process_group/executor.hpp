// Runs a group's collectives in the order of issue.
//
// A collective is a blocking body. A synchronous call runs it at once on the calling thread; an asynchronous one is
// queued for a progress thread, and whoever waits may run the queue itself. One body of a group runs at a time, in the
// order of issue. Progress threads are leader and followers: the one that has finished a body lets another take the
// next before it runs the first one's callbacks, so a callback may itself issue a collective of the group and wait.
// Threads start with the first asynchronous call and sleep on a condition variable when there is nothing to do.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "health/flight/flight_record.hpp"
#include "process_group/work.hpp"

namespace ark {

class Executor : public std::enable_shared_from_this<Executor> {
 public:
  using Ptr = c10::intrusive_ptr<WorkArk>;
  // Numbers and records the work (under the lock, in the order of issue), then runs or queues it.
  void submit(const Ptr& work, bool async, GroupCore& core, FlightEntry& entry);
  // Waits for the work, running the queue on this thread when `may_run`; false when `until` came first.
  bool await(WorkArk& work, Clock::time_point until, bool may_run);
  // Runs `task` on a progress thread: for callbacks of works that finish on a thread that must not run them.
  void defer(std::function<void()> task);
  // Waits until the queue is empty or `until`; true when empty.
  bool drain(Clock::time_point until);
  void stop();  // no more threads; queued works stay for their waiters

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
