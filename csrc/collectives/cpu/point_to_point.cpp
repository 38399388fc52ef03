// Posting, waiting, failing and background progress of send and recv. point_to_point_frames.cpp moves messages through
// the channels.
#include "collectives/cpu/point_to_point.hpp"

#include <algorithm>

#include "util/error.hpp"
#include "util/start_thread.hpp"

namespace ark {

namespace {

constexpr auto kSlice = std::chrono::milliseconds(20);
// Time that the background thread leaves to the poster, who usually waits at once.
constexpr auto kHandOver = std::chrono::microseconds(200);

}  // namespace

PointToPoint::PointToPoint(GroupHealth& health, std::vector<Channel> to, std::vector<Channel> from,
                           std::vector<protocol::Counter*> doorbell_of, SpinPolicy policy,
                           std::function<void(int)> commit)
    : health_(health),
      to_(std::move(to)),
      from_(std::move(from)),
      doorbells_(std::move(doorbell_of)),
      policy_(policy),
      commit_(std::move(commit)),
      peers_(to_.size()) {}

PointToPoint::~PointToPoint() {
  stop();
}

void PointToPoint::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_background_.notify_all();
  ring_and_wake(*doorbells_[health_.rank()]);
  if (background_.joinable()) {
    if (background_.get_id() == std::this_thread::get_id()) {
      background_.detach();
    } else {
      background_.join();
    }
  }
}

void PointToPoint::post(TransferPtr transfer) {
  Finished finished;
  {
    std::lock_guard lock(mutex_);
    // Before the transfer is queued: if no thread can start, the caller sees a failure and its tensor is not touched.
    if (!background_.joinable() && !stopping_)
      background_ = start_thread("the thread that makes send and recv progress", [this] { background(); });
    ++pending_;
    try {
      health_.check_alive(transfer->context);
      if (stopping_) health_.raise(transfer->context);
      if (transfer->is_send && !peers_[transfer->peer].committed) {
        commit_(transfer->peer);
        peers_[transfer->peer].committed = true;
      }
      if (transfer->is_send) {
        peers_[transfer->peer].sends.push_back(transfer);
      } else if (!match_unexpected(transfer, finished)) {
        recvs_.push_back(transfer);
      }
      progress(finished);
    } catch (...) {
      finished.emplace_back(transfer, std::current_exception());
    }
  }
  finish(finished);
  if (transfer->finished.load(std::memory_order_acquire)) return;
  std::lock_guard lock(mutex_);
  wake_background_.notify_one();
}

bool PointToPoint::wait(const Transfer& transfer, Clock::time_point until) {
  protocol::Counter& doorbell = *doorbells_[health_.rank()];
  waiters_.fetch_add(1);
  protocol::store_relaxed(health_.own().waiting_on, int64_t{transfer.peer} + 1);
  struct Leave {
    std::atomic<int>& count;
    int64_t& waiting_on;
    ~Leave() {
      protocol::store_relaxed(waiting_on, int64_t{0});
      count.fetch_sub(1);
    }
  } leave{waiters_, health_.own().waiting_on};
  auto spin_until = Clock::now() + policy_.spin;
  auto next_check = Clock::now() + kSlice;
  while (!transfer.finished.load(std::memory_order_acquire)) {
    const uint64_t seen = protocol::current(doorbell);
    Finished finished;
    bool moved;
    {
      std::lock_guard lock(mutex_);
      moved = progress(finished);
      if (!moved && Clock::now() >= next_check) {
        check_pending(finished);
        next_check = Clock::now() + kSlice;
      }
    }
    finish(finished);
    if (transfer.finished.load(std::memory_order_acquire)) break;
    const auto now = Clock::now();
    if (now >= until) return false;
    if (moved) {
      spin_until = now + policy_.spin;
    } else if (now >= spin_until) {
      sleep_on(doorbell, seen, std::min<std::chrono::nanoseconds>(kSlice, until - now));
      protocol::store_relaxed(health_.own().beat, protocol::load_relaxed(health_.own().beat) + 1);
    }
  }
  return true;
}

// Requires mutex_, like check_pending(), push() and pull().
bool PointToPoint::progress(Finished& finished) {
  bool moved = false;
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    if (peer == health_.rank()) continue;
    moved |= push(peer, finished);
    moved |= pull(peer, finished);
  }
  return moved;
}

void PointToPoint::check_pending(Finished& finished) {
  std::exception_ptr error;
  auto check = [&](const TransferPtr& transfer) {
    if (error) return;
    const int peer = transfer->source != kAnySource ? transfer->source : transfer->peer;
    if (const auto alarm = health_.alarm(transfer->context, peer)) {
      if (progress(finished)) return;  // it made progress after all, so check again in the next slice
      try {
        health_.raise(*alarm, transfer->context, peer);
      } catch (...) {
        error = std::current_exception();
      }
    }
  };
  // Copies, because progress() changes the lists.
  std::vector<TransferPtr> all(recvs_.begin(), recvs_.end());
  for (Peer& peer : peers_) {
    all.insert(all.end(), peer.sends.begin(), peer.sends.end());
    if (peer.incoming) all.push_back(peer.incoming);
    for (const Unexpected& aside : peer.unexpected) {
      if (aside.claimed) all.push_back(aside.claimed);
    }
  }
  for (const TransferPtr& transfer : all) check(transfer);
  if (!error) return;
  std::vector<TransferPtr> already;
  for (const auto& entry : finished) already.push_back(entry.first);
  for (const TransferPtr& transfer : all) {
    if (std::find(already.begin(), already.end(), transfer) != already.end()) continue;
    try {
      health_.raise(transfer->context);
    } catch (...) {
      finished.emplace_back(transfer, std::current_exception());
    }
  }
  recvs_.clear();
  for (Peer& peer : peers_) {
    peer.sends.clear();
    // Discard the rest of a message whose recv has just failed.
    if (peer.reading) peer.discarding = true;
    peer.incoming.reset();
    peer.unexpected.clear();
  }
}

void PointToPoint::fail_all() {
  Finished finished;
  {
    std::lock_guard lock(mutex_);
    check_pending(finished);
  }
  finish(finished);
  ring_and_wake(*doorbells_[health_.rank()]);
}

void PointToPoint::finish(Finished& finished) {
  if (finished.empty()) return;
  for (auto& [transfer, error] : finished) {
    if (const auto done = std::move(transfer->done)) done(error);
    transfer->finished.store(true, std::memory_order_release);  // last, so that a waiter sees what done() wrote
  }
  {
    std::lock_guard lock(mutex_);
    pending_ -= std::min(pending_, finished.size());
  }
  // Other threads of this process may sleep until one of these finishes.
  if (waiters_.load() > 0) ring_and_wake(*doorbells_[health_.rank()]);
}

void PointToPoint::background() {
  protocol::Counter& doorbell = *doorbells_[health_.rank()];
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      wake_background_.wait(lock, [&] { return stopping_ || pending_ > 0; });
      if (stopping_) return;
    }
    std::this_thread::sleep_for(kHandOver);
    auto next_check = Clock::now() + kSlice;
    for (;;) {
      const uint64_t seen = protocol::current(doorbell);
      Finished finished;
      bool moved = false;
      {
        std::lock_guard lock(mutex_);
        if (stopping_) return;
        if (pending_ == 0) break;
        // A waiting thread makes progress for all, so this thread only checks from time to time.
        if (waiters_.load() == 0) moved = progress(finished);
        if (!moved && Clock::now() >= next_check) {
          check_pending(finished);
          next_check = Clock::now() + kSlice;
        }
      }
      finish(finished);
      if (moved) continue;
      if (waiters_.load() > 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      } else {
        sleep_on(doorbell, seen, kSlice);
      }
    }
  }
}

}  // namespace ark
