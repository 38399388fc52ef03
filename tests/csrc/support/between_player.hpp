// Plays the kernels of cuda/between.cuh and tasks of cuda/loop/between.cuh on the CPU: one thread does a lane's or a
// block's work, lane after lane, with the protocol's and the reduction's own code.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "cuda/between.cuh"
#include "cuda/loop/between.cuh"

namespace ark::test {

class LoneThread {
 public:
  using Clock = std::chrono::steady_clock;
  // Of waiting, from which on a lane probes; for tests that count requests.
  static inline std::atomic<uint64_t> probes_after_ns = device::kProbeAfter;

  LoneThread(device::GroupStatus* status, std::chrono::nanoseconds limit) : status_(status), limit_(limit) {}

  bool over(int peer, uint64_t awaited) {
    if (protocol::load_acquire(status_->abort) != 0) return true;
    if (Clock::now() - began_ >= limit_) {
      status_->peer = peer;
      status_->epoch = awaited;
      protocol::store_release(status_->gave_up, protocol::uint32{1});
      protocol::store_release(status_->abort, protocol::uint32{1});
      return true;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    return false;
  }
  bool waits_long() {
    const auto now = Clock::now();
    if (now - std::max(began_, probed_) < std::chrono::nanoseconds(probes_after_ns.load())) return false;
    probed_ = now;
    return true;
  }
  template <class Body>
  bool by_one(Body&& body) {
    began_ = Clock::now();
    return body();
  }
  template <class Body>
  void each_unit(uint64_t bytes, Body&& body) {
    for (uint64_t unit = 0; unit * 16 < bytes; ++unit) body(unit);
  }
  device::Unit load(const void* from, uint64_t unit, uint64_t bytes) const {
    device::Unit value{0, 0};
    std::memcpy(&value, static_cast<const char*>(from) + unit * 16, std::min<uint64_t>(16, bytes - unit * 16));
    return value;
  }
  device::Unit load_here(const void* from, uint64_t unit, uint64_t bytes) const { return load(from, unit, bytes); }
  void store(void* to, uint64_t unit, uint64_t bytes, const device::Unit& value) const {
    std::memcpy(static_cast<char*>(to) + unit * 16, &value, std::min<uint64_t>(16, bytes - unit * 16));
  }
  void load_floats(float* values, const void* from, uint64_t unit) const {
    std::memcpy(values, static_cast<const char*>(from) + unit * 16, 16);
  }
  void store_floats(void* to, uint64_t unit, const float* values) const {
    std::memcpy(static_cast<char*>(to) + unit * 16, values, 16);
  }
  void copy(void* to, const void* from, uint64_t bytes) {
    if (bytes > 0) std::memmove(to, from, bytes);
  }

 private:
  device::GroupStatus* const status_;
  const std::chrono::nanoseconds limit_;
  Clock::time_point began_ = Clock::now(), probed_{};
};

// Returns false if the kernel gave up.
inline bool play_between(const device::BetweenParams& p, device::BetweenForm form) {
  constexpr uint64_t kMostLimit = uint64_t{1} << 60;
  LoneThread team(p.status, std::chrono::nanoseconds(std::min<uint64_t>(p.limit_ns, kMostLimit)));
  for (uint32_t lane = 0; lane < p.window.lanes; ++lane) {
    const device::Between<LoneThread> played{p, team, lane};
    const device::GenericRule rule{p.dtype, p.op};
    const bool done = form == device::BetweenForm::move  ? played.move()
                      : form == device::BetweenForm::add ? played.add(rule)
                                                         : played.add_wide(rule);
    if (!done) return false;
  }
  return true;
}

// In place of a block's threads in a loop kernel.
class LoopThread : public LoneThread {
 public:
  static constexpr int kThreads = 1;
  using LoneThread::LoneThread;
  int thread() const { return 0; }
  bool over(int peer, uint64_t awaited) {
    const std::lock_guard lock(giving_up_);  // workers of a rank share the status
    left_ = peer;
    return LoneThread::over(peer, awaited);
  }
  int left() const { return left_; }  // for whom it waited last
  template <class Body>
  bool by_one(bool holds, Body&& body) {
    return holds && LoneThread::by_one(body);
  }

 private:
  static inline std::mutex giving_up_;
  int left_ = -1;
};

// A launch of a plan that only sums so many bytes of float32 in place, in a group with one rank a node.
inline void play_loop_sum(const loop::Launch<1>& launch, uint64_t bytes) {
  constexpr uint64_t kMostLimit = uint64_t{1} << 60;
  const loop::LaunchHead& head = launch.head;
  const loop::Ranks& ranks = head.ranks;
  LoopThread block(ranks.status, std::chrono::nanoseconds(std::min<uint64_t>(ranks.limit_ns, kMostLimit)));
  const uint64_t step = ++*head.steps;
  const loop::Exchanged with{ranks.packets, 0, ranks.rank, step << 32 | 1};
  const loop::Outside outside{ranks.window, ranks.outside, 0, loop::kChunkBytes};
  void* const data = launch.pointers[0];
  using Sum = loop::NodesSum<device::DType::f32, device::ReduceOp::sum, 1, LoopThread>;
  if (Sum(block, with, outside, data, data, bytes).run(0, bytes)) return;
  head.report->claimed = 1;
  head.report->value = device::outside_rank(block.left());
  protocol::store_release(head.report->failure, static_cast<protocol::uint32>(loop::Failure::peer));
}

}  // namespace ark::test
