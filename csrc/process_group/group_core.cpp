// Life of a group: issue, failure, shutdown, fork.
#include "process_group/group_core.hpp"

#include <pthread.h>

#include <set>

#include "process_group/cuda/cuda_group.hpp"
#include "process_group/translate.hpp"

namespace ark {

namespace {

// Raised in every forked child, so that noticing a fork costs a load and not a system call.
std::atomic<uint64_t> fork_generation{0};

uint64_t current_fork_generation() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { fork_generation.fetch_add(1); });
  (void)registered;
  return fork_generation.load(std::memory_order_relaxed);
}

// Never destroyed: groups may go while the process exits.
struct Registry {
  std::mutex mutex;
  std::set<GroupCore*> groups;
  int closing = 0;  // threads of shutdown_in_background
  std::condition_variable closed;
};
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

constexpr auto kLongest = std::chrono::hours(24 * 365);

}  // namespace

GroupCore::GroupCore(int rank_, int size_) : rank(rank_), size(size_), fork_generation_(current_fork_generation()) {
  std::lock_guard lock(registry().mutex);
  registry().groups.insert(this);
}

GroupCore::~GroupCore() {
  if (forked()) {
    // Threads, sockets and peers belong to the parent; only memory is given up.
    new std::shared_ptr<Executor>(std::move(executor));
    (void)communicator.release();
    (void)carrier.release();
    new std::shared_ptr<CudaGroup>(std::move(cuda_));
    return;
  }
  {
    std::lock_guard lock(registry().mutex);
    registry().groups.erase(this);
  }
  if (flight_group != 0) FlightRecord::instance().retire_group(flight_group);
}

bool GroupCore::forked() const {
  return fork_generation.load(std::memory_order_relaxed) != fork_generation_;
}

void GroupCore::check_forked(const char* operation) const {
  if (forked()) {
    throw Error(ErrorKind::closed, "this process was forked after the group was created, and the group is the parent's",
                ErrorContext{rank, -1, operation, 0,
                             "Create process groups in the child (init_process_group after the fork), or use spawn."});
  }
}

void GroupCore::check_open(const char* operation) const {
  check_forked(operation);
  if (closed_.load(std::memory_order_relaxed)) {
    throw Error(ErrorKind::closed, "the process group was shut down",
                ErrorContext{rank, -1, operation, 0, "Create it again with init_process_group or new_group."});
  }
}

OperationContext GroupCore::context(const char* operation, uint64_t number, std::chrono::milliseconds asked) const {
  // c10d's "unset" is -1 ms; zero means now.
  auto timeout = asked.count() >= 0 ? asked : std::chrono::milliseconds(timeout_ms.load(std::memory_order_relaxed));
  const auto now = Clock::now();
  return {operation, number, timeout < kLongest ? now + timeout : Clock::time_point::max(), timeout};
}

std::chrono::milliseconds GroupCore::extended(std::chrono::milliseconds asked,
                                              const TimeoutExtension::SharePtr& share) const {
  if (!share) return asked;
  const auto own = asked.count() >= 0 ? asked : std::chrono::milliseconds(timeout_ms.load(std::memory_order_relaxed));
  return own < kLongest ? own + share->extra : own;
}

void GroupCore::submit(const c10::intrusive_ptr<WorkArk>& work, bool async, FlightEntry entry,
                       TimeoutExtension::SharePtr share) {
  executor->submit(work, async, [&](WorkArk& numbered) {
    numbered.sequence = sequence.fetch_add(1, std::memory_order_relaxed) + 1;
    if (shm) protocol::store_relaxed(shm->health().own().enqueued, numbered.sequence);
    entry.group = flight_group;
    entry.sequence = numbered.sequence;
    const uint64_t flight = FlightRecord::instance().scheduled(entry);
    numbered.on_done = [core = shared_from_this(), type = numbered.retrieveOpType(), flight, share = std::move(share)](
                           const WorkArk& done, std::exception_ptr error) {
      if (share) share->end();
      core->finished(done, type, flight, error);
    };
    if (flight != 0) {
      numbered.body = [flight, body = std::move(numbered.body)](WorkArk& running) {
        FlightRecord::instance().started(flight);
        body(running);
      };
    }
  });
}

void GroupCore::finished(const WorkArk& work, c10d::OpType type, uint64_t flight, std::exception_ptr failure) {
  if (completion_hook) run_hook(type, work.sequence, work.times().first, work.times().second);
  if (!failure) {
    FlightRecord::instance().completed(flight);
    if (shm && !c10d::isP2POp(type)) protocol::store_relaxed(shm->health().own().completed, work.sequence);
  } else {
    try {
      std::rethrow_exception(failure);
    } catch (const Error& own) {
      FlightRecord::instance().failed(flight, own.what());
      report_failure(own);
    } catch (const std::exception& other) {
      FlightRecord::instance().failed(flight, other.what());
    } catch (...) {
      FlightRecord::instance().failed(flight, "unknown");
    }
  }
}

void GroupCore::report_failure(const Error& failure) {
  c10d::ErrorType none = c10d::ErrorType::SUCCESS;
  const c10d::ErrorType kind = failure.kind() == ErrorKind::timeout     ? c10d::ErrorType::TIMEOUT
                               : failure.kind() == ErrorKind::peer_lost ? c10d::ErrorType::REMOTE_ERROR
                                                                        : c10d::ErrorType::COMM_ERROR;
  error.compare_exchange_strong(none, kind);
  FlightFailure cause;
  cause.key = (static_cast<uint64_t>(flight_group) << 40) ^ (failure.context().sequence << 8) ^
              static_cast<uint64_t>(failure.kind()) ^ (uint64_t{1} << 63);
  cause.group = flight_group;
  cause.has_group = true;
  cause.error = failure.what();
  cause.peer = failure.context().peer;
  cause.operation = failure.context().operation;
  cause.sequence = failure.context().sequence;
  if (shm) {
    int peer = 0;
    for (const auto& progress : shm->health().progress()) {
      cause.peers.push_back({peer++, progress.enqueued, progress.completed, progress.waiting_on, progress.lost,
                             progress.started, progress.operation});
    }
  }
  if (flight_dump.empty()) {
    FlightRecord::instance().note(cause);
  } else {
    FlightRecord::instance().dump(flight_dump_path(flight_dump, global_rank), cause);
  }
  run_abort_hooks();
}

void GroupCore::abort(const std::string& why) {
  if (forked()) return;
  const Error error(ErrorKind::aborted, why, ErrorContext{rank, rank, "abort", 0, "Destroy the process group."});
  if (shm) {
    shm->health().fail(error);
    shm->point_to_point().fail_all();
  }
  if (carrier) {
    communicator->abort(error);
    carrier->abort();
  }
  if (const auto side = cuda()) side->abort();
}

void GroupCore::shutdown(std::chrono::milliseconds patience, std::chrono::milliseconds device_patience) {
  if (forked() || closed_.exchange(true)) return;
  if (!executor->drain(Clock::now() + patience)) {
    abort("the group was destroyed while operations were pending");
    executor->drain(Clock::now() + std::chrono::seconds(2));
  }
  close_device(device_patience);
  if (shm) {
    shm->point_to_point().stop();
    shm->health().say_goodbye();
  }
  executor->stop();
  if (communicator) communicator->close();
  if (carrier) carrier->shutdown();
}

void GroupCore::shutdown_in_background(std::shared_ptr<GroupCore> core, std::chrono::milliseconds patience,
                                       std::chrono::milliseconds device_patience) {
  if (core->forked() || core->closed_.load()) return;
  {
    std::lock_guard lock(registry().mutex);
    ++registry().closing;
  }
  std::thread([core = std::move(core), patience, device_patience]() mutable {
    core->shutdown(patience, device_patience);
    core.reset();
    std::lock_guard lock(registry().mutex);
    --registry().closing;
    registry().closed.notify_all();
  }).detach();
}

namespace {

std::vector<std::shared_ptr<GroupCore>> open_groups() {
  std::vector<std::shared_ptr<GroupCore>> open;
  const std::lock_guard lock(registry().mutex);
  for (GroupCore* core : registry().groups) {
    if (auto held = core->weak_from_this().lock()) open.push_back(std::move(held));
  }
  return open;
}

}  // namespace

void shutdown_all_groups(std::chrono::milliseconds patience) {
  for (const auto& core : open_groups()) core->shutdown(patience, patience);
  std::unique_lock lock(registry().mutex);
  registry().closed.wait_for(lock, patience, [] { return registry().closing == 0; });
}

void look_at_devices() {
  for (const auto& core : open_groups()) {
    if (core->forked()) continue;
    if (const auto side = core->cuda()) side->look();
  }
}

}  // namespace ark
