// The dispatch of a group's CUDA tensors: rank 0's table, what an earlier process measured, or a measurement now.
//
// The built-in values were measured on a few GPU models. On another one, a group's ranks measure theirs together, for
// some seconds, when they first use CUDA tensors, and rank 0 keeps them in the cache for later processes. Both parts
// are functions of Options, because they are written in Python (ark_torch/distributed/first_use.py).
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>

#include "cuda/driver.hpp"
#include "process_group/cuda/cuda_group.hpp"
#include "process_group/process_group_ark.hpp"

namespace ark {

namespace {

bool has_rule(const std::vector<CudaRule>& rules, int size) {
  return std::any_of(rules.begin(), rules.end(), [&](const CudaRule& rule) { return size <= rule.max_ranks; });
}

}  // namespace

// All ranks learn from the first agreement whether they measure; then rank 0 tells what came of it. A rank that fails
// in between, or leaves, ends neither: the measurement's waits are bounded, and the second agreement is checked.
// Each check has the group's timeout from when it is made.
CudaDispatch ProcessGroupArk::find_dispatch(KeyValueStore& store, c10::Device device,
                                            const std::function<Check()>& make_check) {
  std::vector<CudaRule> rules = options_->cuda_dispatch;
  DispatchLimits limits = cuda_limits();
  // NCCL's default share was measured with one GPU a rank, and needs peers' memory.
  if (rank_ == 0 && size_ > 1 && options_->make_cuda_carrier && !options_->share_gpu && !options_->nccl_leaves_p2p)
    limits.model = device_name(device.index());
  // Ranks that share a GPU wait for each other's slices of time, so that figures would mean nothing.
  const bool free = rank_ == 0 && size_ > 1 && !options_->share_gpu && !has_rule(rules, size_);
  if (free && options_->known_dispatch && options_->measure_dispatch) {
    const auto known = options_->known_dispatch(device.index(), size_);
    limits.to_measure = !known;
    if (known && !known->empty()) rules = {{size_, CudaDispatch::measured(size_, *known)}};
  }
  const CudaDispatch agreed = agree_on_dispatch(store, rank_, size_, rules, limits, make_check());
  if (!agreed.to_measure) return agreed;
  if (options_->measure_dispatch) {
    const auto apart = c10::make_intrusive<c10d::PrefixStore>("ark/first-use/" + start_, store_);
    const auto numbers = options_->measure_dispatch(apart, rank_, size_, device.index());
    if (rank_ == 0 && !numbers.empty()) rules = {{size_, CudaDispatch::measured(size_, numbers)}};
  }
  limits.to_measure = false;
  limits.key = "dispatch/measured";
  return agree_on_dispatch(store, rank_, size_, rules, limits, make_check());
}

// One log line for a group whose captured steps use other rings than its other collectives.
void ProcessGroupArk::set_captures_step(bool value) {
  captures_step_.store(value, std::memory_order_relaxed);
  const auto dispatch = cuda_dispatch();
  if (!value || rank_ != 0 || !options_->log || !dispatch) return;
  const std::string carried = dispatch->step_carried();
  if (carried.empty() || told_of_step_.exchange(true)) return;
  options_->log("group \"" + options_->group_name + "\" of " + std::to_string(size_) + " ranks: in captured steps " +
                carried);
}

std::optional<CudaDispatch> ProcessGroupArk::cuda_dispatch() const {
  const auto cuda = core_->cuda();
  const auto communicator = cuda ? cuda->communicator() : nullptr;
  return communicator ? std::optional(communicator->dispatch()) : std::nullopt;
}

}  // namespace ark
