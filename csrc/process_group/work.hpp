// The Work of a collective or of a send/recv, which c10d's users wait on and take futures from.
//
// The group's Executor (executor.hpp) runs a collective's body once, on a progress thread or a waiter. The thread that
// makes the last progress finishes a send or recv. finish() publishes the outcome with a release store of done_;
// readers that acquire it may read error_ and the times (futures are read under the lock of settled_). Callbacks run
// afterwards in settle(), without locks, so they may issue collectives and wait.
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

// Waits for an operation with asyncOp=false. A carrier may return no work for it: NCCL's runs on the current stream.
inline void wait_for(const c10::intrusive_ptr<c10d::Work>& work) {
  if (work) work->wait();
}

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
  // Runs the body once, without callbacks. settle() runs those, without locks.
  void execute();
  void finish(std::exception_ptr error);
  void settle();
  // Returns the callbacks for a caller that must not run them itself; empty if no future was requested.
  std::function<void()> take_settlement();
  std::pair<Clock::time_point, Clock::time_point> times() const { return {started_, finished_}; }

  // Set before the work is handed out.
  OperationRecord operation;
  std::function<bool(Clock::time_point)> wait_elsewhere;  // send/recv: waits and makes progress
  std::function<void()> poll;                             // carried send/recv: checks whether it is done
  std::function<void()> need_progress;                    // carried send/recv: makes progress without a waiter
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

// Makes `work` stand for other works: it completes when all have and fails with the first failure. `on_success` runs
// once before it finishes.
void follow(const c10::intrusive_ptr<WorkArk>& work, std::vector<c10::intrusive_ptr<c10d::Work>> parts,
            std::function<void()> on_success, const std::shared_ptr<Executor>& executor);

}  // namespace ark
