// Life and administration of the process group: creation, splitting, timeouts, abort, shutdown.
#include "process_group/process_group_ark.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>

#include "process_group/cuda/cuda_group.hpp"

namespace ark {

namespace {

constexpr auto kPatience = std::chrono::seconds(10);  // how long shutdown() waits for pending operations

// Device operations may queue behind much other work that no caller has waited for, but they end by their timeout.
std::chrono::milliseconds device_patience_of(const GroupCore& core) {
  return std::min<std::chrono::milliseconds>(std::chrono::milliseconds(core.timeout_ms.load()),
                                             std::chrono::hours(24)) +
         kPatience;
}

}  // namespace

c10::intrusive_ptr<ProcessGroupArk> ProcessGroupArk::create(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                            int size, const c10::intrusive_ptr<Options>& options) {
  return c10::make_intrusive<ProcessGroupArk>(store, rank, size, options);
}

ProcessGroupArk::ProcessGroupArk(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                 const c10::intrusive_ptr<Options>& options)
    : Backend(rank, size), store_(store), options_(options), core_(std::make_shared<GroupCore>(rank, size)) {
  with_torch_errors([&] { join(); });
}

ProcessGroupArk::~ProcessGroupArk() {
  // Never waits here: Python may hold its lock during this call (DDP's Reducer does), and a progress thread may need
  // that lock to release a tensor. shutdown_all_groups() waits at exit.
  const auto device_patience = device_patience_of(*core_);
  GroupCore::shutdown_in_background(std::move(core_), kPatience, device_patience);
}

void ProcessGroupArk::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  std::lock_guard lock(mutex_);
  comms_ready_ = false;
}

void ProcessGroupArk::setTimeout(std::chrono::milliseconds timeout) {
  with_torch_errors([&] {
    if (timeout.count() <= 0) {
      refuse(site("set_timeout"), ErrorKind::invalid_argument, "timeout is " + std::to_string(timeout.count()) + " ms",
             "Pass a positive timedelta.");
    }
  });
  options_->timeout = timeout;
  core_->timeout_ms = timeout.count();
  const auto cuda = core_->cuda();
  if (!cuda || !cuda->nccl) return;
  if (const auto nccl = cuda->nccl->backend()) nccl->setTimeout(timeout + NcclEntry::kLater);
}

void ProcessGroupArk::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  with_torch_errors([&] {
    site("monitored_barrier");
    if (core_->shm) {
      core_->shm->monitored_barrier(core_->context("monitored_barrier", 0, options.timeout), wait_all_ranks);
    } else {
      core_->carrier->monitoredBarrier(options, wait_all_ranks);
    }
  });
}

void ProcessGroupArk::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  with_torch_errors([&] {
    if (core_->completion_hook) {
      refuse(site("register_on_completion_hook"), ErrorKind::invalid_argument,
             "a completion hook is registered already", "Register one hook a group.");
    }
  });
  onCompletionHook_ = hook;
  core_->completion_hook = std::move(hook);
}

void ProcessGroupArk::waitForPendingWorks() {
  core_->executor->drain(Clock::time_point::max());
  if (const auto cuda = core_->cuda()) cuda->drain(Clock::time_point::max());
  core_->wait_for_hooks();
}

void ProcessGroupArk::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  with_torch_errors([&] {
    if (timeout.count() < 0) {
      refuse(site("add_ephemeral_timeout"), ErrorKind::invalid_argument,
             "timeout is " + std::to_string(timeout.count()) + " ms", "Pass the timedelta by which to extend.");
    }
  });
  core_->extension->add(timeout);
}

void ProcessGroupArk::registerAbortHook(int64_t id, GroupCore::AbortHook hook) {
  core_->add_abort_hook(id, std::move(hook));
}

void ProcessGroupArk::unregisterAbortHook(int64_t id) {
  core_->remove_abort_hook(id);
}

c10::intrusive_ptr<c10d::Backend::Options> ProcessGroupArk::Options::clone() const {
  return c10::make_intrusive<Options>(*this);
}

void ProcessGroupArk::abort() {
  core_->run_abort_hooks();
  core_->abort("abort() was called on rank " + std::to_string(rank_));
}

void ProcessGroupArk::shutdown() {
  core_->shutdown(kPatience, device_patience_of(*core_));
  const std::unique_lock lock(registering_, std::try_to_lock);
  if (lock.owns_lock()) registration_.reset();
}

c10::intrusive_ptr<ProcessGroupArk::Options> ProcessGroupArk::options_like(
    const c10::intrusive_ptr<c10d::Backend::Options>& given) const {
  auto options = c10::make_intrusive<Options>(*options_);
  if (!given) return options;
  if (auto* own = dynamic_cast<Options*>(given.get())) {
    options = c10::make_intrusive<Options>(*own);
    if (!options->make_carrier) options->make_carrier = options_->make_carrier;
    if (!options->make_cuda_carrier) options->make_cuda_carrier = options_->make_cuda_carrier;
    if (!options->known_dispatch) options->known_dispatch = options_->known_dispatch;
    if (!options->measure_dispatch) options->measure_dispatch = options_->measure_dispatch;
    if (!options->allocate) options->allocate = options_->allocate;
    if (!options->log) options->log = options_->log;
    options->global_rank = options_->global_rank;
    return options;
  }
  options->timeout = given->timeout;
  options->group_name = given->group_name;
  options->group_desc = given->group_desc;
  options->global_ranks_in_group = given->global_ranks_in_group;
  return options;
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupArk::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                         const std::vector<int>& ranks,
                                                         const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  return with_torch_errors([&]() -> c10::intrusive_ptr<c10d::Backend> {
    const CallSite here = site("split_group");
    for (int member : ranks) check_rank(here, "ranks", member, size_);
    const auto found = std::find(ranks.begin(), ranks.end(), rank_);
    if (found == ranks.end()) return nullptr;
    auto options = options_like(opts);
    std::unique_lock lock(mutex_);
    // PyTorch asks once for each device type of an instance, with the same name and store.
    if (auto child = children_.find(options->group_name); child != children_.end() && !options->group_name.empty()) {
      return child->second;
    }
    lock.unlock();
    if (options->global_ranks_in_group.empty()) {
      for (int member : ranks) {
        options->global_ranks_in_group.push_back(
            options_->global_ranks_in_group.empty() ? member : options_->global_ranks_in_group[member]);
      }
    }
    auto child = create(store, static_cast<int>(found - ranks.begin()), static_cast<int>(ranks.size()), options);
    lock.lock();
    children_[options->group_name] = child;
    return child;
  });
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupArk::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                         const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                                         const int& rank, const int& size) {
  return with_torch_errors([&]() -> c10::intrusive_ptr<c10d::Backend> {
    check_rank(site("merge"), "rank", rank, size);
    auto options = options_like(opts);
    if (!opts) options->global_ranks_in_group.clear();
    return create(store, rank, size, options);
  });
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupArk::shrink(const std::vector<int64_t>& ranks_to_exclude, int,
                                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  return with_torch_errors([&]() -> c10::intrusive_ptr<c10d::Backend> {
    core_->check_forked("shrink");  // shrinking a failed or aborted group is allowed: that is its purpose
    const CallSite here{rank_, "shrink"};
    std::vector<bool> out(size_, false);
    for (int64_t member : ranks_to_exclude) {
      check_rank(here, "ranks_to_exclude", member, size_);
      out[member] = true;
    }
    if (out[rank_]) {
      refuse(here, ErrorKind::invalid_argument, "ranks_to_exclude names this rank, " + std::to_string(rank_),
             "Call shrink on the ranks that stay.");
    }
    auto options = options_like(opts);
    std::vector<uint64_t> members;
    int rank = 0, size = 0;
    for (int member = 0; member < size_; ++member) {
      if (out[member]) continue;
      if (member == rank_) rank = size;
      ++size;
      members.push_back(options_->global_ranks_in_group.empty() ? member : options_->global_ranks_in_group[member]);
    }
    options->global_ranks_in_group = members;
    if (!opts) options->group_name += ":shrunk" + std::to_string(shrinks_);
    auto store = c10::make_intrusive<c10d::PrefixStore>("shrink" + std::to_string(shrinks_++), store_);
    return create(store, rank, size, options);
  });
}

}  // namespace ark
