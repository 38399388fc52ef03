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

namespace ark {

// What does not change over a group's life; built once at its construction.
struct CommsGroup {
  std::tuple<std::string, std::string> name;  // group name, description
  int rank = 0;
  int size = 0;
  int global_rank_start = 0;  // c10d::getGlobalRankStartAndStride
  int global_rank_stride = 1;
};

// One call. `rank` is what NCCL shows as "Rank": the own rank, but the root of broadcast, reduce, gather and scatter,
// the destination of send and the source of recv.
struct CommsCall {
  const char* name;
  const char* title;  // of the annotation, behind "ark:"
  int64_t sequence;
  bool is_p2p = false;
  int rank;
  c10::IValue inputs;  // a tensor, a list of tensors or a list of lists: what the method was given
  c10::IValue outputs;
  int64_t input_elements;
  int64_t output_elements;
  at::ScalarType dtype;
  const std::vector<int64_t>* input_splits = nullptr;
  const std::vector<int64_t>* output_splits = nullptr;
  bool async;
};

class CommsRecord {
 public:
  // `describe()` returns the CommsCall; it runs only when someone listens.
  template <typename Describe>
  CommsRecord(const CommsGroup& group, Describe&& describe) {
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION); callbacks.has_value())
        [[unlikely]] {
      start(group, describe(), std::move(*callbacks));
    }
  }
  CommsRecord(const CommsRecord&) = delete;
  CommsRecord& operator=(const CommsRecord&) = delete;

 private:
  void start(const CommsGroup& group, CommsCall call, at::StepCallbacks&& callbacks);

  // Order matters: the event ends (and reads the debug info) before the info is taken away.
  std::optional<c10::DebugInfoGuard> info_;
  std::optional<at::RecordFunction> annotation_, event_;
};

}  // namespace ark
