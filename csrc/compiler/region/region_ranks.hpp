// The ranks with which a region on a GPU exchanges packets: their group, and the memory that receives the packets.
//
// A call is an operation of the group: issued in the same order on all ranks, and ordered on the device after earlier
// and before later operations of the group, on any stream. Ordering across groups is the user's task, as with NCCL's
// communicators: loop kernels take whole multiprocessors and could deadlock waiting for each other's peers. The memory
// is shared at the first call, and again if the group was recreated. Captured calls use the same memory, which lives as
// long as the graph; users must order replays and eager calls identically on all ranks. The window between nodes lives
// as long as the group, as that of other captured operations. A wait on a peer ends with the group (its watch reports a
// lost rank to the device) or after the group's timeout, which fails it: the launch has no result, the context
// survives, and the next call raises.
#pragma once

#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <mutex>
#include <string>

#include "collectives/cuda/cuda_communicator.hpp"
#include "compiler/runtime/cuda_loop.hpp"
#include "cuda/loop/launch.cuh"
#include "util/error.hpp"

namespace ark {
class NodesCommunicator;
class ProcessGroupArk;
}  // namespace ark

namespace ark::compiler {

class RegionRanks {
 public:
  // `group`: its name in PyTorch. `kernel` must outlive this object.
  RegionRanks(std::string region, std::string group, c10::Device device, CudaLoop& kernel);

  // Calls step(stream, ranks) as an operation of the group. Returns false on all ranks, without calling it, if another
  // backend carries the group's CUDA tensors or a device has no room for the packets. Throws the error that ended the
  // group, with where the step before was left.
  using Step = c10::function_ref<void(CUstream stream, const loop::Ranks& ranks)>;
  bool launch(Step step);
  // After a launch that ended early with `left`: if the group has ended, throws the reason, with `left` added.
  void raise_ended(const Error& left);

 private:
  uint64_t fingerprint() const;  // of what ranks must have alike
  // Shares memory with the group's ranks.
  void meet(CudaCommunicator& communicator);
  void meet(NodesCommunicator& communicator);
  void set(const CudaCommunicator::Shared& shared);
  // Throws Error(invalid_argument) unless the group is still what the region was compiled for.
  ProcessGroupArk& checked(c10d::Backend* backend) const;

  const std::string region_, group_;
  const c10::Device device_;
  CudaLoop& kernel_;
  std::mutex mutex_;                            // guards the members below
  c10::weak_intrusive_ptr<c10d::Backend> met_;  // the backend whose ranks share `ranks_`
  loop::Ranks ranks_{};
  std::shared_ptr<void> keep_;  // owns the memory of `ranks_`
  bool refused_ = false;
};

}  // namespace ark::compiler
