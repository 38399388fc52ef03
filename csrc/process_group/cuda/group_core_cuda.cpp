// What a group's core has to do with its CUDA device: numbering, failures, the end.
#include <c10/util/Exception.h>

#include "process_group/cuda/cuda_group.hpp"
#include "process_group/group_core.hpp"

namespace ark {

namespace {
constexpr std::chrono::seconds kTelling{60};  // of a failure, when the group is destroyed
}  // namespace

std::shared_ptr<CudaGroup> GroupCore::cuda() {
  const std::lock_guard lock(cuda_mutex_);
  return cuda_;
}

void GroupCore::adopt(std::shared_ptr<CudaGroup> side) {
  // The plain pointer is good: the side is closed, and says nothing any more, before the core goes.
  side->started = [side = side.get()](const Enqueued& operation) {
    if (const int64_t start = side->times_of(operation, false).first; start != 0)
      FlightRecord::instance().started_on_device(operation.flight, start);
  };
  side->completed = [this, side = side.get()](const Enqueued& operation) {
    {
      // A kernel that gave up has ended as well, and so have those behind it.
      const std::lock_guard lock(cuda_mutex_);
      const uint64_t failed_from = device_failure_ ? device_failure_->context().sequence : ~uint64_t{0};
      if (operation.sequence >= failed_from) {
        if (failed_from > 0) FlightRecord::instance().failed(operation.flight, device_failure_->what());
        return;  // from 0: nobody knows which one it was
      }
    }
    const auto [start, end] = side->times_of(operation, true);
    FlightRecord::instance().completed_on_device(operation.flight, start, end);
    if (shm && !c10d::isP2POp(operation.type))
      protocol::store_relaxed(shm->health().own().completed, operation.sequence);
    if (completion_hook) {
      const auto at = [](int64_t time, Clock::time_point otherwise) {
        return time == 0 ? otherwise : Clock::time_point(std::chrono::nanoseconds(time));
      };
      run_hook(operation.type, operation.sequence, at(start, operation.issued), at(end, Clock::now()));
    }
  };
  const std::lock_guard lock(cuda_mutex_);
  cuda_ = std::move(side);
}

std::pair<uint64_t, uint64_t> GroupCore::number(FlightEntry entry) {
  const uint64_t issued = sequence.fetch_add(1, std::memory_order_relaxed) + 1;
  if (shm) protocol::store_relaxed(shm->health().own().enqueued, issued);
  entry.group = flight_group;
  entry.sequence = issued;
  return {issued, FlightRecord::instance().scheduled(entry)};
}

void GroupCore::not_enqueued(uint64_t flight, const Error& cause) {
  // What this machine could not do (compile, launch, allocate): the peers wait on their devices for what will not come.
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
  // Kernels may still run, and threads watch them or tell of them: what they use is given up rather than freed.
  if (!ended) new std::shared_ptr<GroupCore>(shared_from_this());
}

}  // namespace ark
