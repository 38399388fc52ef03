// Launches a region as an operation of its group, and shares packet memory at the first call. See region_ranks.hpp.
#include "compiler/region/region_ranks.hpp"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <numeric>
#include <utility>

#include "collectives/cuda/between/nodes_communicator.hpp"
#include "compiler/schedule/targets.hpp"
#include "cuda/graph_owned.hpp"
#include "cuda/loop/between.cuh"
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

void RegionRanks::set(const CudaCommunicator::Shared& shared) {
  ranks_ = {};
  std::copy(shared.memory.begin(), shared.memory.end(), ranks_.packets);
  std::iota(std::begin(ranks_.names), std::end(ranks_.names), 0);
  ranks_.status = shared.status;
}

// Ranks must have the same collectives, and plans made with the same figures: those decide in which order products of
// many depths are summed, so that results which ranks compute alike would differ in their last bits.
uint64_t RegionRanks::fingerprint() const {
  return kernel_.exchanges().fingerprint ^ digest_of_costs(kernel_.plan().target);
}

void RegionRanks::meet(CudaCommunicator& communicator) {
  const Exchanges& all = kernel_.exchanges();
  std::string why;
  const auto shared = communicator.share(static_cast<uint64_t>(all.bytes), fingerprint(), why);
  refused_ = shared == nullptr;
  if (refused_) return;
  set(*shared);
  ranks_.rank = communicator.rank();
  keep_ = shared->keep;
}

void RegionRanks::meet(NodesCommunicator& communicator) {
  const Exchanges& all = kernel_.exchanges();
  rdma::GpuWindow::Shape shape;
  shape.lanes = static_cast<uint32_t>(all.lanes), shape.slots = loop::kSlotsOfLane;
  shape.chunk_bytes = static_cast<uint64_t>(all.message_bytes);
  std::string why;
  const auto shared = communicator.share(static_cast<uint64_t>(all.bytes), fingerprint(), shape, why);
  refused_ = shared == nullptr;
  if (refused_) return;
  set(*shared->here);
  std::copy(shared->names.begin(), shared->names.end(), ranks_.names);
  std::copy(shared->outside.begin(), shared->outside.end(), ranks_.outside);
  ranks_.window = shared->window;
  ranks_.rank = communicator.place();
  keep_ = shared->keep;
}

ProcessGroupArk& RegionRanks::checked(c10d::Backend* backend) const {
  const Exchanges& all = kernel_.exchanges();
  auto* const group = dynamic_cast<ProcessGroupArk*>(backend);
  std::string why;
  if (group != nullptr && group->getSize() == all.ranks && group->regions_over_nodes(why) == all.nodes) return *group;
  throw Error(ErrorKind::invalid_argument,
              region_ + ": the process group '" + group_ + "' is no ark group of " + std::to_string(all.ranks) +
                  " ranks" + (all.nodes > 1 ? " on " + std::to_string(all.nodes) + " nodes" : "") + " any more" +
                  (why.empty() ? "" : ": " + why),
              ErrorContext{-1, -1, "", 0, "Compile again (torch._dynamo.reset())."});
}

bool RegionRanks::launch(Step step) {
  const auto backend = cuda_backend(region_, group_);
  ProcessGroupArk& group = checked(backend.get());
  bool launched = false;
  const auto run = [&](auto& communicator, const Operation& operation) {
    const std::lock_guard lock(mutex_);
    communicator.check(operation.context);
    const Capture capture = capture_of(static_cast<CUstream>(operation.stream));
    if (met_.lock().get() != backend.get()) {
      if (capture.id != 0)
        throw Error(ErrorKind::invalid_argument,
                    region_ + ": its first call with this group is under graph capture, where ranks cannot meet",
                    ErrorContext{-1, -1, "", 0, "Call it once, on all ranks, before the capture begins."});
      kernel_.renew();  // the memory of a new group starts as zeros, so the count of steps restarts too
      meet(communicator);
      met_ = c10::weak_intrusive_ptr<c10d::Backend>(backend);
    }
    if (refused_) return;
    if (capture.id != 0) keep_with_graph(capture, keep_);
    ranks_.limit_ns = limit_of(operation.context);
    step(static_cast<CUstream>(operation.stream), ranks_);
    launched = true;
  };
  try {
    const bool ours = kernel_.exchanges().nodes > 1 ? group.launch_over_nodes(kName, device_, run)
                                                    : group.launch_region(kName, device_, run);
    return ours && launched;
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
