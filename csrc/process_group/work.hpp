// The Work of a collective or of a send/recv: what c10d's users hold, wait on and take futures from.
//
// A collective's body is run once, by the group's Executor (executor.hpp) on a progress thread or on a thread that
// waits; a send or recv is finished by whoever made its last progress. finish() publishes the outcome with a release
// store of done_, after which readers that acquire it may read error_ and the times (futures: under the lock that
// guards settled_). Callbacks run after that, in settle(), never with a lock held: they may issue collectives and wait.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "process_group/operation_record.hpp"
#include "process_group/torch_version.hpp"

namespace ark {

class Executor;
class GroupCore;

class WorkArk : public c10d::Work {
 public:
  WorkArk(std::shared_ptr<GroupCore> core, c10d::OpType type, const char* name, std::vector<at::Tensor> outputs);

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
  uint64_t getSequencenumber() const override { return operation.sequence(); }
  std::chrono::milliseconds getTimeout() const ARK_OVERRIDE_SINCE_2_14;

  bool done() const { return done_.load(std::memory_order_acquire); }
  // Runs the body (once). Does not run callbacks: settle() does, without locks held.
  void execute();
  void finish(std::exception_ptr error);
  void settle();
  // The callbacks to run, for whoever must not run them himself; empty when nobody asked for a future.
  std::function<void()> take_settlement();
  std::pair<Clock::time_point, Clock::time_point> times() const { return {started_, finished_}; }

  // Set before the work is handed out.
  OperationRecord operation;
  std::function<bool(Clock::time_point)> wait_elsewhere;  // send/recv: who makes progress for it
  std::function<void()> poll;                             // carried send/recv: looks whether it is done
  std::function<void()> need_progress;                    // ... and makes it progress without a waiter
  int source_rank = -1;

 private:
  const std::shared_ptr<GroupCore> core_;
  const std::vector<at::Tensor> outputs_;
  const std::chrono::milliseconds group_timeout_;
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

}  // namespace ark
