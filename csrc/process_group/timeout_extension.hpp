// Temporary extensions of a group's timeout: c10d's addEphemeralTimeout().
//
// An extension applies to every operation issued after it, until the first of these has ended. At issue an operation
// takes the active total, owns the part that no earlier operation owns, and returns that part when it ends. Extensions
// add up and end separately. Without any, an operation costs one load.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>

namespace ark {

class TimeoutExtension : public std::enable_shared_from_this<TimeoutExtension> {
 public:
  using Milliseconds = std::chrono::milliseconds;

  // An operation's share. It ends once, at the latest with its last owner.
  class Share {
   public:
    Share(std::shared_ptr<TimeoutExtension> of, Milliseconds extra, Milliseconds owned)
        : extra(extra), of_(std::move(of)), owned_(owned.count()) {}
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;
    ~Share() { end(); }
    void end() {
      if (const int64_t owned = owned_.exchange(0); owned != 0) of_->give_back(Milliseconds(owned));
    }
    const Milliseconds extra;

   private:
    const std::shared_ptr<TimeoutExtension> of_;
    std::atomic<int64_t> owned_;
  };
  using SharePtr = std::shared_ptr<Share>;

  void add(Milliseconds extra) {
    const std::lock_guard lock(mutex_);
    active_ += extra.count();
  }

  // Takes the share of an operation at issue; null if there is no extension.
  SharePtr take() {
    if (active_.load(std::memory_order_relaxed) == 0) return nullptr;
    const std::lock_guard lock(mutex_);
    const int64_t active = active_.load(std::memory_order_relaxed);
    const int64_t owned = active - owned_;
    owned_ = active;
    return std::make_shared<Share>(shared_from_this(), Milliseconds(active), Milliseconds(owned));
  }

 private:
  void give_back(Milliseconds owned) {
    const std::lock_guard lock(mutex_);
    active_ -= owned.count();
    owned_ -= owned.count();
  }

  std::mutex mutex_;                // guards writers and owned_
  std::atomic<int64_t> active_{0};  // sum of active extensions, in ms
  int64_t owned_ = 0;               // the part that some operation will end
};

}  // namespace ark
