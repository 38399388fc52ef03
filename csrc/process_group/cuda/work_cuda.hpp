// The Work of operations on CUDA tensors, and how a stream or host thread waits for it.
//
// As with ProcessGroupNCCL, wait() makes the current stream wait and returns at once. It blocks the host for a barrier
// or with a timeout. A work may cover several coalesced operations and have a part on the host (a barrier's). Tensors
// of asynchronous operations live until wait() or until the device is done. wait(), isCompleted() (through exception())
// and later operations report a failed group. The future only reports what was known when it was made, because its
// consumers run on streams too.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <vector>

#include "process_group/cuda/cuda_group.hpp"
#include "process_group/group_core.hpp"

namespace ark {

class CudaWork : public c10d::Work {
 public:
  using Parts = std::vector<CudaGroup::RecordPtr>;
  CudaWork(std::shared_ptr<GroupCore> core, std::shared_ptr<CudaGroup> cuda, c10d::OpType type, const char* name,
           std::vector<at::Tensor> outputs, Parts parts);
  ~CudaWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void blockCurrentStream() override { synchronize(); }
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override { return sequence_; }
  std::chrono::milliseconds getTimeout() const ARK_OVERRIDE_SINCE_2_14;

  // Set before the work is handed out.
  bool blocks_host = false;                  // for a barrier
  c10::intrusive_ptr<c10d::Work> host_part;  // completes before this work
  std::chrono::milliseconds timeout{-1};     // as requested; -1: the group's
  int source_rank = -1;

 private:
  friend c10::intrusive_ptr<c10d::Work> join_cuda(const std::shared_ptr<GroupCore>&,
                                                  const std::vector<c10::intrusive_ptr<c10d::Work>>&);
  OperationContext context() const { return {name_, sequence_}; }  // for messages, without a deadline
  bool done() const;
  void check_group();  // throws the group's failure and records it
  void wait_streams(const c10::Stream& current);
  void wait_host(std::chrono::milliseconds given);
  void release(const c10::Stream& current);
  // Returns why the group failed before this work was done, or null.
  std::exception_ptr failure() const;

  const std::shared_ptr<GroupCore> core_;
  const std::shared_ptr<CudaGroup> cuda_;
  const char* const name_;
  const uint64_t sequence_;
  const std::vector<at::Tensor> outputs_;
  const Parts parts_;
  bool released_ = false;  // mutex_ guards this and the futures
  c10::intrusive_ptr<c10::ivalue::Future> future_, future_result_;
};

// Joins several works, at least one of them on a CUDA device; returns null if none is. Works on the host and of other
// backends are waited for here.
c10::intrusive_ptr<c10d::Work> join_cuda(const std::shared_ptr<GroupCore>& core,
                                         const std::vector<c10::intrusive_ptr<c10d::Work>>& works);

}  // namespace ark
