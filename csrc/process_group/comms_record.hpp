// Eager collectives in torch.profiler: one "record_param_comms" event a call, as ProcessGroupNCCL emits, and the
// annotation "ark:all_reduce" around it, where NCCL has "nccl:all_reduce".
//
// A CommsRecord lives on the stack of whoever issues the operation, so that the event spans the issue (for a
// synchronous one the whole operation, for an asynchronous one its enqueueing, as with NCCL). Nothing is built unless
// some RecordFunction callback wants this call: the test is one thread-local read, so an unprofiled call pays a few
// nanoseconds. NCCL builds the strings and vectors always.
//
// The constructor of ParamCommsDebugInfo gained isAsynchronizedOp and sequence numbers between the supported PyTorch
// minors; the `requires` below choose what the headers at hand offer.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "process_group/operation_record.hpp"

namespace ark {

// What does not change over a group's life; built once at its construction.
struct CommsGroup {
  std::tuple<std::string, std::string> name;  // group name, description
  int rank = 0;
  int size = 0;
  int global_rank_start = 0;  // c10d::getGlobalRankStartAndStride
  int global_rank_stride = 1;
};

class CommsRecord {
 public:
  // `sequence`: the number that the operation will have.
  CommsRecord(const CommsGroup& group, const Call& call, uint64_t sequence) {
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION); callbacks.has_value())
        [[unlikely]] {
      start(group, call, static_cast<int64_t>(sequence), std::move(*callbacks));
    }
  }
  CommsRecord(const CommsRecord&) = delete;
  CommsRecord& operator=(const CommsRecord&) = delete;

 private:
  void start(const CommsGroup& group, const Call& call, int64_t sequence, at::StepCallbacks&& callbacks);

  // Order matters: the event ends (and reads the debug info) before the info is taken away.
  std::optional<c10::DebugInfoGuard> info_;
  std::optional<at::RecordFunction> annotation_, event_;
};

}  // namespace ark
