// Runs a group's collectives in issue order.
//
// A collective is a blocking body. A synchronous call runs it on the calling thread. An asynchronous one is queued for
// a progress thread, and a waiter may run the queue itself. One body of a group runs at a time. Progress threads follow
// the leader/follower pattern: after a body, another thread takes the next one before this thread runs callbacks. So a
// callback may issue a collective of the same group and wait for it. Threads start with the first asynchronous call and
// sleep when idle.
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
  // Numbers and records the work under the lock, in issue order, then runs or queues it.
  void submit(const Ptr& work, bool async, GroupCore& core, FlightEntry& entry);
  // Waits for the work, and runs the queue on this thread if `may_run`. Returns false at `until`.
  bool await(WorkArk& work, Clock::time_point until, bool may_run);
  // Runs `task` on a progress thread, for callbacks of works that finish on a thread that must not run them.
  void defer(std::function<void()> task);
  // Waits until the queue is empty or until `until`. Returns true if it is empty.
  bool drain(Clock::time_point until);
  void stop();  // stops the threads; queued works stay for their waiters

 private:
  void run_front(std::unique_lock<std::mutex>& lock);
  void ensure_thread();
  void thread_main();
  void released();

  std::mutex mutex_;
  std::condition_variable ready_;    // for progress threads
  std::condition_variable changed_;  // for waiters
  std::deque<Ptr> queue_;
  std::deque<std::function<void()>> deferred_;
  bool running_ = false;
  bool stopping_ = false;
  int idle_ = 0;
  int waiting_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace ark
