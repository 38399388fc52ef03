// The completion hook: told of every finished work, in the order in which they finished, on a thread of its own.
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

void GroupCore::wait_for_hooks() {
  std::unique_lock lock(hooks_mutex_);
  hooks_changed_.wait(lock, [&] { return hooks_pending_ == 0; });
}

}  // namespace ark
