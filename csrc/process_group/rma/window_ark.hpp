// A window of a group of ark: PyTorch's one-sided interface on collectives/rma/rma_window.hpp, for CPU tensors.
//
// Registering a tensor moves its storage into memory that the ranks of the node can map, as share_memory_() does; the
// tensor and its views stay what they are, addresses that were taken before do not. In a node of one rank it stays
// where it is. A put carries no signal of its own. Works are those of the group: they wait, fail and are recorded as
// sends and receives are.
#pragma once

#include <memory>
#include <mutex>
#include <set>

#include "collectives/rma/rma_window.hpp"
#include "process_group/rma/window_interface.hpp"
#include "process_group/tensors.hpp"

namespace ark {

class GroupCore;
class ProcessGroupArk;

class WindowArk final : public BaseWindow {
 public:
  explicit WindowArk(c10::intrusive_ptr<ProcessGroupArk> group);
  ~WindowArk() override;

  void tensor_register(const at::Tensor& tensor, bool owning) override;
  void tensor_deregister() override;
  c10::intrusive_ptr<c10d::Work> put(const at::Tensor& tensor, int64_t peer, int64_t offset, bool async,
                                     const PutOptions& options) override;
  at::Tensor map_remote_tensor(int64_t rank) override;
  c10::intrusive_ptr<c10d::Work> signal(int64_t peer, bool async, const SignalOptions& options) override;
  c10::intrusive_ptr<c10d::Work> wait_signal(int64_t peer, bool async, const WaitSignalOptions& options) override;
  WindowAttr get_attr(int64_t peer) override;

 private:
  struct Issue;
  CallSite site(const char* operation) const;
  std::shared_ptr<RmaWindow> opened(const CallSite& site) const;  // refuses where no tensor is registered
  void check_device(const CallSite& site, const at::Tensor& tensor);
  Issue begin(const CallSite& site, const char* argument, int64_t peer, std::chrono::milliseconds timeout,
              const at::Tensor* tensor);
  static c10::intrusive_ptr<c10d::Work> follow_transfer(Issue issue, const std::shared_ptr<RmaWindow>& window,
                                                        const RmaWindow::Transfer& transfer, bool async);

  const c10::intrusive_ptr<ProcessGroupArk> group_;
  const std::shared_ptr<GroupCore> core_;
  mutable std::mutex mutex_;  // of what follows
  std::shared_ptr<RmaWindow> window_;
  at::Tensor tensor_;           // kept alive, where the window owns it
  std::set<int> reached_gpus_;  // whose memory the NICs were seen to reach
};

}  // namespace ark
