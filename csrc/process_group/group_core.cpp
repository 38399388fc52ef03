// The life of a group: numbering, completion, failures and hooks, its CUDA device, shutdown and fork.
#include "process_group/group_core.hpp"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <set>

#include "process_group/cuda/cuda_group.hpp"
#include "process_group/translate.hpp"

namespace ark {

namespace {

// Incremented in every forked child, so that detecting a fork costs a load instead of a system call.
std::atomic<uint64_t> fork_generation{0};

uint64_t current_fork_generation() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { fork_generation.fetch_add(1); });
  (void)registered;
  return fork_generation.load(std::memory_order_relaxed);
}

// Never destroyed, because groups may be destroyed during process exit.
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
constexpr std::chrono::seconds kTelling{60};  // time to report a failure when the group is destroyed

}  // namespace

GroupCore::GroupCore(int rank_, int size_) : rank(rank_), size(size_), fork_generation_(current_fork_generation()) {
  std::lock_guard lock(registry().mutex);
  registry().groups.insert(this);
}

GroupCore::~GroupCore() {
  if (forked()) {
    // Threads, sockets and peers belong to the parent, so leak them in the child.
    new std::shared_ptr<Executor>(std::move(executor));
    (void)communicator.release();
    (void)carrier.release();
    new std::vector(std::move(windows_));
    new std::shared_ptr<rdma::Messages>(std::move(rdma));
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
  // c10d passes -1 ms for "unset"; zero means now.
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

void GroupCore::number(OperationRecord& operation, FlightEntry& entry) {
  entry.group = flight_group;
  if (!entry.is_p2p) {
    entry.sequence = sequence.fetch_add(1, std::memory_order_relaxed) + 1;
    operation.context.sequence = operation.descriptor.sequence = entry.sequence;
    if (shm) protocol::store_relaxed(shm->health().own().enqueued, entry.sequence);
  }
  operation.flight = FlightRecord::instance().scheduled(entry);
  operation.numbered = true;
}

void GroupCore::finished(const WorkArk& work, std::exception_ptr failure) {
  const OperationRecord& operation = work.operation;
  const uint64_t flight = operation.flight;
  if (completion_hook) run_hook(operation.type, operation.sequence(), work.times().first, work.times().second);
  if (!failure) {
    FlightRecord::instance().completed(flight);
    if (shm && !c10d::isP2POp(operation.type))
      protocol::store_relaxed(shm->health().own().completed, operation.sequence());
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

c10d::ErrorType GroupCore::state() {
  const c10d::ErrorType known = error.load();
  if (known != c10d::ErrorType::SUCCESS || (shm == nullptr && node_health == nullptr)) return known;
  return health().alarm({}, -1) ? c10d::ErrorType::REMOTE_ERROR : known;
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

// The completion hook hears of finished works in order, on a progress thread. Abort hooks instead run on the thread
// that found the failure, before the error is raised.
void GroupCore::run_hook(c10d::OpType type, uint64_t number, Clock::time_point started, Clock::time_point ended) {
  // A hook may be slow, take Python's lock or issue collectives, so it does not run here.
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

// Only one thread runs this at a time, so the hook hears of works in the order in which they finished.
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
  std::shared_ptr<AbortHook> removed;  // destroyed outside the lock, because it may hold Python objects
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

std::shared_ptr<CudaGroup> GroupCore::cuda() {
  const std::lock_guard lock(cuda_mutex_);
  return cuda_;
}

void GroupCore::adopt(std::shared_ptr<CudaGroup> side) {
  // The raw pointer is safe: close_device() ends the side's calls before the core is destroyed.
  side->started = [side = side.get()](const OperationRecord& operation) {
    if (const int64_t start = side->times_of(operation, false).first; start != 0)
      FlightRecord::instance().started_on_device(operation.flight, start);
  };
  side->completed = [this, side = side.get()](const OperationRecord& operation) {
    {
      // A kernel that gave up has ended too, as have those behind it, so they do not count as completed.
      const std::lock_guard lock(cuda_mutex_);
      const uint64_t failed_from = device_failure_ ? device_failure_->context().sequence : ~uint64_t{0};
      if (operation.sequence() >= failed_from) {
        if (failed_from > 0) FlightRecord::instance().failed(operation.flight, device_failure_->what());
        return;  // 0: the failing operation is unknown
      }
    }
    const auto [start, end] = side->times_of(operation, true);
    FlightRecord::instance().completed_on_device(operation.flight, start, end);
    if (shm && !c10d::isP2POp(operation.type))
      protocol::store_relaxed(shm->health().own().completed, operation.sequence());
    if (completion_hook) {
      const auto at = [](int64_t time, Clock::time_point otherwise) {
        return time == 0 ? otherwise : Clock::time_point(std::chrono::nanoseconds(time));
      };
      run_hook(operation.type, operation.sequence(), at(start, operation.issued), at(end, Clock::now()));
    }
  };
  const std::lock_guard lock(cuda_mutex_);
  cuda_ = std::move(side);
}

void GroupCore::not_enqueued(uint64_t flight, const Error& cause) {
  // This machine failed (compile, launch or allocation), so the peers' devices wait for something that will not come.
  const bool of_this_machine = cause.kind() == ErrorKind::system || cause.kind() == ErrorKind::compile_failed;
  if (of_this_machine && shm && size > 1) shm->health().fail(cause);
  FlightRecord::instance().failed(flight, cause.what());
  report_failure(cause);
}

void GroupCore::device_gives_up(const Error& cause) {
  const std::lock_guard lock(cuda_mutex_);
  device_failure_ = cause;
}

void GroupCore::device_gave_up(const Error& cause) {
  if (const auto side = cuda()) side->look();
  report_failure(cause);
}

void GroupCore::close_device(std::chrono::milliseconds patience) {
  const auto side = cuda();
  if (!side) return;
  if (side->carrier) {
    side->carrier->shutdown();
    return;
  }
  bool drained = side->drain(Clock::now() + patience);
  if (!drained) {
    abort("the group was destroyed while operations were pending on the device");
    drained = side->drain(Clock::now() + std::chrono::seconds(2));
  }
  if (side->nccl) drained ? side->nccl->close(std::chrono::seconds(10)) : side->nccl->abort();
  const std::optional<std::string> untold = side->wait_told(Clock::now() + kTelling);
  if (untold)
    TORCH_WARN("ark: a destroyed group waited ", kTelling.count(),
               " s for a thread that tells of its failure, and gives up its memory: the device does not answer, or the "
               "record of operations cannot be written. The failure: ",
               *untold);
  const bool ended = drained && !untold;
  side->close(ended);
  // Kernels may still run, and threads may still watch them or report, so leak what they use.
  if (!ended) new std::shared_ptr<GroupCore>(shared_from_this());
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
  const std::lock_guard lock(windows_mutex_);
  windows_.clear();
}

void GroupCore::keep(std::shared_ptr<RmaWindow> window) {
  const std::lock_guard lock(windows_mutex_);
  windows_.push_back(std::move(window));
}

void GroupCore::forget(const std::shared_ptr<RmaWindow>& window) {
  const std::lock_guard lock(windows_mutex_);
  std::erase(windows_, window);
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
