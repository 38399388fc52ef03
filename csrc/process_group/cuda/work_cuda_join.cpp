// One work for the operations on CUDA tensors between startCoalescing and endCoalescing.
#include <algorithm>

#include "process_group/cuda/work_cuda.hpp"

namespace ark {

c10::intrusive_ptr<c10d::Work> join_cuda(const std::shared_ptr<GroupCore>& core,
                                         const std::vector<c10::intrusive_ptr<c10d::Work>>& works) {
  CudaWork::Parts parts;
  std::vector<at::Tensor> outputs;
  std::shared_ptr<CudaGroup> cuda;
  std::chrono::milliseconds timeout{-1};
  bool blocks_host = false;
  for (const auto& work : works) {
    auto* on_device = dynamic_cast<CudaWork*>(work.get());
    if (on_device == nullptr) continue;
    cuda = on_device->cuda_;
    parts.insert(parts.end(), on_device->parts_.begin(), on_device->parts_.end());
    outputs.insert(outputs.end(), on_device->outputs_.begin(), on_device->outputs_.end());
    timeout = std::max(timeout, on_device->timeout);
    blocks_host |= on_device->blocks_host;
    if (on_device->host_part) on_device->host_part->wait();
    const std::lock_guard lock(on_device->mutex_);
    on_device->released_ = true;  // the joined work keeps the tensors
  }
  if (!cuda) return nullptr;
  bool waited = false;
  for (const auto& work : works) {
    if (dynamic_cast<CudaWork*>(work.get()) != nullptr) continue;
    work->wait();
    waited = true;
  }
  // A carrier's was waited for by the current stream alone; another may wait for the joined work.
  if (waited) {
    const uint64_t sequence = parts.empty() ? 0 : parts.back()->sequence;
    parts.push_back(cuda->mark(c10d::OpType::COALESCED, "coalesced", sequence));
  }
  auto joined = c10::make_intrusive<CudaWork>(core, cuda, c10d::OpType::COALESCED, "coalesced", std::move(outputs),
                                              std::move(parts));
  joined->timeout = timeout;
  joined->blocks_host = blocks_host;
  return joined;
}

}  // namespace ark
