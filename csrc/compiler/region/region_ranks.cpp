// Launches a region as an operation of its group, and shares packet memory at the first call. See region_ranks.hpp.
#include "compiler/region/region_ranks.hpp"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <utility>

#include "cuda/graph_owned.hpp"
#include "cuda/loop/launch.cuh"
#include "process_group/process_group_ark.hpp"
#include "util/error.hpp"

namespace ark::compiler {

namespace {

constexpr const char* kName = "compiled_region";  // of the operation

c10::intrusive_ptr<c10d::Backend> cuda_backend(const std::string& region, const std::string& name) {
  try {
    return c10d::resolve_process_group(name)->getBackend(c10::DeviceType::CUDA);
  } catch (const c10::Error&) {
    throw Error(ErrorKind::closed, region + ": there is no process group '" + name + "' for CUDA tensors any more",
                ErrorContext{-1, -1, "", 0, "Make it again, or compile again (torch._dynamo.reset())."});
  }
}

unsigned long long limit_of(const OperationContext& context) {
  if (context.deadline == Clock::time_point::max()) return ~0ull;
  return static_cast<unsigned long long>(std::max<int64_t>(context.timeout.count(), 1)) * 1'000'000;
}

}  // namespace

RegionRanks::RegionRanks(std::string region, std::string group, c10::Device device, CudaLoop& kernel)
    : region_(std::move(region)),
      group_(std::move(group)),
      device_(device),
      kernel_(kernel),
      met_(c10::intrusive_ptr<c10d::Backend>()) {}

// Shares memory with the group's ranks. The memory of a new group starts as zeros, so the count of steps restarts too.
void RegionRanks::meet(CudaCommunicator& communicator, bool capturing) {
  if (capturing)
    throw Error(ErrorKind::invalid_argument,
                region_ + ": its first call with this group is under graph capture, where ranks cannot meet",
                ErrorContext{-1, -1, "", 0, "Call it once, on all ranks, before the capture begins."});
  kernel_.renew();
  const Exchanges& all = kernel_.exchanges();
  std::string why;
  shared_ = communicator.share(static_cast<uint64_t>(all.bytes), all.fingerprint, why);
  refused_ = shared_ == nullptr;
}

bool RegionRanks::launch(Step step) {
  const auto backend = cuda_backend(region_, group_);
  auto* const group = dynamic_cast<ProcessGroupArk*>(backend.get());
  if (group == nullptr || group->getSize() != kernel_.exchanges().ranks)
    throw Error(ErrorKind::invalid_argument,
                region_ + ": the process group '" + group_ + "' is no ark group of " +
                    std::to_string(kernel_.exchanges().ranks) + " ranks any more",
                ErrorContext{-1, -1, "", 0, "Compile again (torch._dynamo.reset())."});
  bool launched = false;
  const auto run = [&](CudaCommunicator& communicator, const Operation& operation) {
    const std::lock_guard lock(mutex_);
    communicator.check(operation.context);
    const Capture capture = capture_of(static_cast<CUstream>(operation.stream));
    if (met_.lock().get() != backend.get()) {
      meet(communicator, capture.id != 0);
      met_ = c10::weak_intrusive_ptr<c10d::Backend>(backend);
    }
    if (refused_) return;
    if (capture.id != 0) keep_with_graph(capture, shared_->keep);
    loop::Ranks ranks{};
    std::copy(shared_->memory.begin(), shared_->memory.end(), ranks.packets);
    ranks.status = shared_->status;
    ranks.limit_ns = limit_of(operation.context);
    ranks.rank = communicator.rank();
    step(static_cast<CUstream>(operation.stream), ranks);
    launched = true;
  };
  try {
    return group->launch_region(kName, device_, run) && launched;
  } catch (const Error& error) {
    const std::string left = kernel_.left();
    if (left.empty()) throw;
    throw Error(error.kind(), error.message() + "; " + region_ + ": " + left, error.context());
  }
}

void RegionRanks::raise_ended(const Error& left) {
  const auto backend = cuda_backend(region_, group_);
  auto* const group = dynamic_cast<ProcessGroupArk*>(backend.get());
  if (group == nullptr) return;
  try {
    group->check_region(kName, device_);
  } catch (const Error& error) {
    throw Error(error.kind(), error.message() + "; " + region_ + ": " + left.message(), error.context());
  }
}

}  // namespace ark::compiler
