// The completion hook: told of every finished work, in the order in which they finished, on a thread of its own. And
// the abort hooks, which run on the thread that found the failure, so that they come before the error is raised.
#include <c10/util/Exception.h>

#include "process_group/group_core.hpp"

namespace ark {

void GroupCore::run_hook(c10d::OpType type, uint64_t number, Clock::time_point started, Clock::time_point ended) {
  // On a thread of its own: a hook may be slow, take Python's lock, or issue collectives.
  auto info = std::make_shared<c10d::WorkInfo>(type, number, started, ended, ended - started);
  {
    std::lock_guard lock(hooks_mutex_);
    ++hooks_pending_;
    hooks_.push_back(std::move(info));
    if (hooks_running_) return;
    hooks_running_ = true;
  }
  executor->defer([self = shared_from_this()] { self->drain_hooks(); });
}

// One thread at a time, so that the hook hears of works in the order in which they finished.
void GroupCore::drain_hooks() {
  std::unique_lock lock(hooks_mutex_);
  while (!hooks_.empty()) {
    const auto info = std::move(hooks_.front());
    hooks_.pop_front();
    lock.unlock();
    completion_hook(info);
    lock.lock();
    --hooks_pending_;
    hooks_changed_.notify_all();
  }
  hooks_running_ = false;
}

void GroupCore::add_abort_hook(int64_t id, AbortHook hook) {
  const std::lock_guard lock(hooks_mutex_);
  abort_hooks_[id] = std::make_shared<AbortHook>(std::move(hook));
}

void GroupCore::remove_abort_hook(int64_t id) {
  std::shared_ptr<AbortHook> removed;  // goes without the lock held: it may hold Python objects
  const std::lock_guard lock(hooks_mutex_);
  if (const auto found = abort_hooks_.find(id); found != abort_hooks_.end()) {
    removed = std::move(found->second);
    abort_hooks_.erase(found);
  }
}

void GroupCore::run_abort_hooks() {
  std::map<int64_t, std::shared_ptr<AbortHook>> hooks;
  {
    const std::lock_guard lock(hooks_mutex_);
    hooks = abort_hooks_;
  }
  for (const auto& [id, hook] : hooks) {
    try {
      (*hook)();
    } catch (const std::exception& error) {
      TORCH_WARN("ark: [rank ", rank, "] abort hook ", id, " failed: ", error.what());
    }
  }
}

void GroupCore::wait_for_hooks() {
  std::unique_lock lock(hooks_mutex_);
  hooks_changed_.wait(lock, [&] { return hooks_pending_ == 0; });
}

}  // namespace ark
