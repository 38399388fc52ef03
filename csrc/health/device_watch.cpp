// The thread of device_watch.hpp: ten times a second it reads each group's words, notices kernels that gave up and copy
// engines that are stuck, fails their group, and releases streams of failed groups. It only accesses memory and never
// calls the driver, so it cannot block on a user's copy.
#include "health/device_watch.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "cuda/between.cuh"
#include "health/failure_log.hpp"
#include "protocol/atomics.hpp"
#include "util/start_thread.hpp"

namespace ark {

namespace {
constexpr std::chrono::milliseconds kWatchInterval{100};
constexpr std::chrono::seconds kStill{1};  // after this, copy engines wait rather than move
}  // namespace

struct DeviceWatch::Watched {
  GroupHealth* health;
  device::GroupStatus* status;
  Hear note;
  std::optional<FailureLog> log;
  std::mutex mutex;
  bool over = false;     // the group is gone
  bool noticed = false;  // the device gave up, and that was handled
  device::EngineStatus* engine = nullptr;
  std::function<void()> release_engine;
  std::function<void()> failed;
  std::function<EngineDiagnosis()> diagnose_engine;
  std::mutex limits;  // guards the longest limit since the engines were last idle, and the last one
  std::chrono::milliseconds engine_limit{0}, engine_last_limit{0};
  uint32_t engine_progress = 0, engine_beat = 0;
  Clock::time_point engine_stuck_since = Clock::time_point::max();

  // The rank that a kernel means: of this node by its place, of another node as cuda/between.cuh says it.
  int named(int peer) const { return device::is_outside(peer) ? device::outside_rank(peer) : health->name(peer); }

  // `peer` -1: unknown.
  Error waited(const std::string& what, int peer) const {
    const std::string whom = peer < 0 ? "a peer" : "rank " + std::to_string(peer);
    return Error(ErrorKind::timeout, what + " waited for " + whom + " until the operation's timeout",
                 ErrorContext{health->name(health->rank()), peer, "", 0,
                              "Look at " + (peer < 0 ? std::string("the other ranks'") : "that rank's") +
                                  " output: it may have stopped, or called other collectives."});
  }

  void fail_in_words(const GroupHealth::Alarm& alarm, int peer, bool told) {
    try {
      health->raise(alarm, {}, peer);
    } catch (const Error& error) {
      if (told) tell(error);
    }
  }

  void fail_engine(const Error& error) {
    health->fail(error);
    tell(error);
  }

  void tell(const Error& error) {
    if (note) note(error);
    log->add(error);
  }

  // While a peer has failed, its streams are being released and their words mean nothing. The next look handles its
  // failure.
  bool a_peer_failed() const {
    const OperationContext any;
    for (int peer = 0; peer < health->size(); ++peer) {
      if (peer == health->rank()) continue;
      const auto alarm = health->alarm(any, peer);
      if (alarm && alarm->kind == GroupHealth::Alarm::peer_failed) return true;
    }
    return false;
  }

  // A peer says goodbye when its device has finished, so everything that it issued has arrived. Bit r: rank r left.
  bool will_not_call(int peer, uint32_t departed) const {
    return peer >= 0 && (departed >> (peer & 31) & 1) != 0 &&
           protocol::load_relaxed(health->of(peer).enqueued) < protocol::load_relaxed(health->own().enqueued);
  }

  void look_at_engine(uint32_t departed) {
    if (engine == nullptr) return;
    protocol::store_relaxed(engine->clock, protocol::load_relaxed(engine->clock) + 1);
    const uint32_t progress = protocol::load_relaxed(engine->progress), beat = protocol::load_relaxed(engine->beat);
    const bool busy = protocol::load_relaxed(engine->busy) != 0;
    std::unique_lock lock(limits);
    if (!busy) engine_limit = engine_last_limit;
    const auto limit = engine_limit;
    lock.unlock();
    if (!busy) {
      engine_stuck_since = Clock::time_point::max();
    } else if (progress != engine_progress || beat != engine_beat || engine_stuck_since == Clock::time_point::max()) {
      engine_stuck_since = Clock::now();
    } else if (!health->failed()) {
      const auto stuck_for = Clock::now() - engine_stuck_since;
      const bool timed_out = stuck_for > limit;
      const bool asked = protocol::load_relaxed(engine->expected) != 0, left = departed != 0 && stuck_for >= kStill;
      const EngineDiagnosis found = timed_out || asked || left ? diagnose_engine() : EngineDiagnosis{};
      if (a_peer_failed()) return;
      const int peer = health->size() == 2 ? 1 - health->rank() : found.peer;
      if (found.mismatched)
        fail_engine(Error(ErrorKind::mismatch,
                          "rank " + std::to_string(found.peer) +
                              " passed another place of registered memory than this rank, or memory that is not "
                              "registered, or called another operation",
                          ErrorContext{health->rank(), found.peer, "", 0,
                                       "Pass tensors at the same place of the same registered memory on all ranks."}));
      else if (left && will_not_call(peer, departed))
        fail_in_words({GroupHealth::Alarm::departed, peer}, peer, true);
      else if (timed_out)
        fail_engine(waited("copy engines of this rank", named(peer)));
    }
    engine_progress = progress, engine_beat = beat;
    if (health->failed()) release_engine();
  }

  void look() {
    std::lock_guard lock(mutex);
    if (over) return;
    if (protocol::load_acquire(status->gave_up) != 0 && !noticed) {
      noticed = true;
      const int peer = named(status->peer);
      const bool failed_before = health->failed();
      const Error error = waited("a kernel on this rank's GPU", peer);
      health->fail(error);
      if (!failed_before) tell(error);
    }
    uint32_t departed = 0;
    bool lost = health->failed();
    const OperationContext any;
    for (int peer = 0; peer < health->size(); ++peer) {
      if (peer == health->rank()) continue;
      const auto alarm = health->alarm(any, peer);
      if (!alarm) continue;
      if (alarm->kind == GroupHealth::Alarm::departed) {
        departed |= 1u << (peer & 31);
        continue;
      }
      lost = true;
      fail_in_words(*alarm, peer, false);
    }
    protocol::store_relaxed(status->departed, departed);
    if (lost) protocol::store_release(status->abort, uint32_t{1});
    look_at_engine(departed);
    log->start();
    if (failed && health->failed()) failed();
  }
};

namespace {

// Never destroyed, because groups may be destroyed during process exit.
class Thread {
 public:
  using Look = std::function<void()>;

  static Thread& instance() {
    static auto* thread = new Thread;
    return *thread;
  }

  void add(const void* key, Look look) {
    std::lock_guard lock(mutex_);
    if (owner_ != ::getpid()) {  // a forked child has no such thread
      looks_.clear();
      owner_ = ::getpid();
      start_thread("the thread that watches GPUs", [this] { run(); }).detach();
    }
    looks_.push_back({key, std::move(look)});
    changed_.notify_all();
  }

  void remove(const void* key) {
    std::lock_guard lock(mutex_);
    std::erase_if(looks_, [&](const auto& entry) { return entry.first == key; });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !looks_.empty(); });
      const auto looks = looks_;
      lock.unlock();
      for (const auto& [key, look] : looks) {
        try {
          look();
        } catch (const std::exception&) {  // must not end the process
        }
      }
      lock.lock();
      changed_.wait_for(lock, kWatchInterval, [] { return false; });
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::pair<const void*, Look>> looks_;
  pid_t owner_ = 0;
};

}  // namespace

DeviceWatch::DeviceWatch(GroupHealth& health, device::GroupStatus* status, Hear log, Hear note)
    : watched_(std::make_shared<Watched>()) {
  watched_->health = &health;
  watched_->status = status;
  watched_->log.emplace(std::move(log));
  watched_->note = std::move(note);
  Thread::instance().add(watched_.get(), [watched = watched_] { watched->look(); });
}

DeviceWatch::~DeviceWatch() {
  Thread::instance().remove(watched_.get());
  {
    const std::lock_guard lock(watched_->mutex);
    watched_->over = true;
  }
  watched_->log.reset();
}

std::optional<std::string> DeviceWatch::wait_told(Clock::time_point until) const {
  return watched_->log->wait_told(until);
}

void DeviceWatch::check(const OperationContext& context) {
  if (protocol::load_acquire(watched_->status->gave_up) != 0) watched_->look();
  watched_->health->check_alive(context);
}

void DeviceWatch::watch_engine(device::EngineStatus* status, std::function<void()> release,
                               std::function<EngineDiagnosis()> diagnose) {
  std::lock_guard lock(watched_->mutex);
  watched_->engine = status;
  watched_->release_engine = std::move(release);
  watched_->diagnose_engine = std::move(diagnose);
}

void DeviceWatch::engine_used(std::chrono::milliseconds limit) {
  // About a hundred years; more would overflow the clock's nanoseconds.
  constexpr std::chrono::milliseconds kUnlimited = std::chrono::hours(24 * 365 * 100);
  const std::lock_guard lock(watched_->limits);
  watched_->engine_last_limit = limit.count() > 0 ? std::min(limit, kUnlimited) : kUnlimited;
  watched_->engine_limit = std::max(watched_->engine_limit, watched_->engine_last_limit);
}

void DeviceWatch::forget_engine() {
  std::lock_guard lock(watched_->mutex);
  watched_->engine = nullptr;
}

void DeviceWatch::when_failed(std::function<void()> then) {
  std::lock_guard lock(watched_->mutex);
  watched_->failed = std::move(then);
}

void DeviceWatch::abort() {
  protocol::store_release(watched_->status->abort, uint32_t{1});
}

}  // namespace ark
