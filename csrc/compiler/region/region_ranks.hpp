// The ranks that a region on a GPU exchanges packets with: their group, and the memory that the packets come to.
//
// A call is an operation of the group: it is issued in the same order on all ranks, and the device runs it after what
// was issued to the group before and ahead of what comes later, on whatever streams. (A loop kernel takes whole
// multiprocessors: beside an eager collective of the same group, each rank could hold what the other waits for. So it
// could beside one of another group, or another group's region: those must reach the devices in one order, which is the
// user's to see to, as with NCCL's communicators.) The memory is shared at the first call, by all ranks together, and
// again where the group was made anew. Calls captured in a graph use the same memory, which lives as long as the graph:
// the graph's replays, and eager calls beside them, must be ordered by the user, and alike on all ranks, as must those
// of eager collectives.
//
// A wait on a peer ends with the group (its watch tells the device of a lost rank) or after the group's timeout, which
// then fails the group. The launch is left without a result, the context goes on, and the next call raises.
#pragma once

#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <mutex>
#include <string>

#include "collectives/cuda/cuda_communicator.hpp"
#include "compiler/runtime/cuda_loop.hpp"
#include "util/error.hpp"

namespace ark::compiler {

class RegionRanks {
 public:
  // `group`: the name that PyTorch knows it by. `kernel` outlives this.
  RegionRanks(std::string region, std::string group, c10::Device device, CudaLoop& kernel);

  // Calls step(stream, ranks) as an operation of the group. False, on all ranks alike, and nothing done: something else
  // carries the group's CUDA tensors, or a device has no room for the packets. Throws what ended the group, with where
  // the step before was left.
  using Step = c10::function_ref<void(CUstream stream, const loop::Ranks& ranks)>;
  bool launch(Step step);
  // After a launch that was left with `left`: throws what ended the group, if anything has, with that.
  void raise_ended(const Error& left);

 private:
  void meet(CudaCommunicator& communicator, bool capturing);

  const std::string region_, group_;
  const c10::Device device_;
  CudaLoop& kernel_;
  std::mutex mutex_;                            // guards the next
  c10::weak_intrusive_ptr<c10d::Backend> met_;  // whose ranks share `shared_`
  std::unique_ptr<CudaCommunicator::Shared> shared_;
  bool refused_ = false;
};

}  // namespace ark::compiler
