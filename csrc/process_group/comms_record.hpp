// Shows eager collectives in torch.profiler: one "record_param_comms" event per call, as ProcessGroupNCCL emits, inside
// an annotation such as "ark:all_reduce".
//
// A CommsRecord lives on the issuer's stack, so the event spans the whole of a synchronous operation and the enqueueing
// of an asynchronous one, as with NCCL. Nothing is built unless a RecordFunction callback wants the call; the test is
// one thread-local read. ParamCommsDebugInfo's constructor differs between PyTorch minors, so `requires` expressions
// select the members.
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

// Properties that stay constant over a group's life, built once.
struct CommsGroup {
  std::tuple<std::string, std::string> name;  // group name, description
  int rank = 0;
  int size = 0;
  int global_rank_start = 0;  // from c10d::getGlobalRankStartAndStride
  int global_rank_stride = 1;
};

class CommsRecord {
 public:
  // `sequence`: the number that the operation will get.
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

  // The order matters: the event ends, and reads the debug info, before the info is removed.
  std::optional<c10::DebugInfoGuard> info_;
  std::optional<at::RecordFunction> annotation_, event_;
};

}  // namespace ark
