// Temporary extensions of a group's timeout: c10d's addEphemeralTimeout().
//
// An extension counts for every operation issued after it, until the first of these has ended. So an operation takes
// what is active as it is issued, owns what no operation before it owns, and gives that back as it ends. Several
// extensions add up, and each ends by itself. Without one an operation costs a load.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>

namespace ark {

class TimeoutExtension : public std::enable_shared_from_this<TimeoutExtension> {
 public:
  using Milliseconds = std::chrono::milliseconds;

  // An operation's part; ends once, at the latest with its last owner.
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

  // For an operation that is being issued; null when there is no extension.
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

  std::mutex mutex_;                // writers, and owned_
  std::atomic<int64_t> active_{0};  // all extensions that count, ms
  int64_t owned_ = 0;               // those that some operation is to end
};

}  // namespace ark
