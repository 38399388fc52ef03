// Windows of a group: whether it has any, and where their ranks meet.
//
// The ranks of a node meet once for all windows of the group (shm/memory_meeting.hpp), those of different nodes through
// the store at each. All ranks call alike: the n-th window of one rank is that of the others.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "process_group/process_group_ark.hpp"
#include "process_group/rma/window_ark.hpp"

namespace ark {

bool ProcessGroupArk::supportsWindow() const {
  return core_->shm != nullptr || core_->rdma != nullptr;
}

bool ProcessGroupArk::shares_windows() const {
  return core_->shm ? size_ > 1 : core_->plan->own().size() > 1;
}

c10::intrusive_ptr<BaseWindow> ProcessGroupArk::new_window(const std::optional<at::Tensor>& tensor) {
  return with_torch_errors([&]() -> c10::intrusive_ptr<BaseWindow> {
    const CallSite here = site("new_window");
    if (!supportsWindow())
      refuse(here, ErrorKind::system,
             "this group's ranks share no memory and Gloo carries it, which has no one-sided writes (no RDMA: " +
                 core_->no_rdma + ")",
             "Give every rank an RDMA device (docs/rdma.md), or use send and recv.");
    auto window =
        c10::make_intrusive<WindowArk>(c10::intrusive_ptr<ProcessGroupArk>::unsafe_reclaim_from_nonowning(this));
    if (tensor) window->tensor_register(*tensor, true);
    return window;
  });
}

std::shared_ptr<RmaWindow> ProcessGroupArk::open_window(const std::function<RmaWindow::Memory()>& offer) {
  const std::lock_guard lock(windowing_);
  if (window_failure_) throw *window_failure_;
  const std::chrono::milliseconds timeout(core_->timeout_ms.load());
  RmaWindow::Setup setup;
  setup.rank = rank_, setup.size = size_;
  setup.number = ++windows_;
  setup.timeout = timeout;
  setup.health = &core_->health();
  setup.messages = core_->rdma;
  setup.prefix = "window/" + start_ + "/" + std::to_string(setup.number);
  setup.fail = [core = std::weak_ptr<GroupCore>(core_)](const Error& error) {
    const auto held = core.lock();
    if (!held) return;
    if (held->shm) held->shm->health().fail(error);
    held->communicator->abort(error);
  };
  if (core_->shm) {
    for (int rank = 0; rank < size_; ++rank) setup.own.push_back(rank);
  } else {
    setup.own = core_->plan->own();
  }
  setup.store = std::make_shared<StoreAdapter>(c10::make_intrusive<c10d::PrefixStore>("ark", store_));
  if (shares_windows() && !window_meeting_) {
    MemoryMeeting::Options options;
    options.rank = core_->shm ? rank_ : core_->plan->local();
    options.size = static_cast<int>(setup.own.size());
    options.timeout = timeout;
    options.name = "windows/" + start_ + (core_->shm ? "" : "/" + std::to_string(core_->plan->node()));
    options.check = [core = core_.get()] {
      core->check_open("new_window");
      core->health().check_alive({"new_window", 0});
    };
    std::string why;
    try {
      window_meeting_ = MemoryMeeting::join(*setup.store, options, why);
      if (!window_meeting_)
        throw Error(ErrorKind::system, "the ranks cannot meet to share windows: " + why,
                    ErrorContext{rank_, -1, "new_window", 0, "Mend that on every rank, or use send and recv."});
    } catch (const Error& error) {
      window_failure_ = error;  // the peers have gone on: there is no second try
      throw;
    }
  }
  if (window_meeting_) window_meeting_->set_timeout(timeout);
  setup.meeting = window_meeting_;
  auto window = RmaWindow::open(std::move(setup), offer);
  core_->keep(window);
  return window;
}

void ProcessGroupArk::close_window(const std::shared_ptr<RmaWindow>& window) {
  const std::lock_guard lock(windowing_);
  window->close();
  core_->forget(window);
}

}  // namespace ark
