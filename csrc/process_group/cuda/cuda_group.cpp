// Orders operations on the device with streams and events.
#include "process_group/cuda/cuda_group.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <set>
#include <thread>

#include "process_group/group_core.hpp"

namespace ark {

namespace {

// A query of the device costs more than an entry, so entries are checked in batches. A device that lags behind is asked
// again after another batch.
constexpr size_t kBatch = 16;

// Pool streams in use by lines of this process. Two lines on one stream could deadlock (a large send ahead of the
// receive that the peer waits for), and PyTorch hands out the same few streams in turn.
struct LineStreams {
  std::mutex mutex;
  std::multiset<std::pair<c10::DeviceIndex, c10::StreamId>> used;
};
LineStreams& line_streams() {
  static auto* streams = new LineStreams;
  return *streams;
}
constexpr int kPoolStreams = 32;  // per priority

}  // namespace

CudaCommunicator::Options communicator_options(c10::Device device, GroupCore& core, bool share_gpu) {
  CudaCommunicator::Options options;
  options.device = device.index();
  options.timeout = std::chrono::milliseconds(core.timeout_ms.load());
  options.device_each = !share_gpu;
  options.note = [&core](const Error& error) { core.device_gives_up(error); };
  options.log = [&core](const Error& error) { core.device_gave_up(error); };
  return options;
}

bool OperationRecord::done() {
  if (capture != 0 || seen_done.load(std::memory_order_acquire)) return true;
  if (!has_passed(end)) return false;
  seen_done.store(true, std::memory_order_release);
  return true;
}

OperationRecord::Held OperationRecord::release() {
  const std::lock_guard lock(mutex);
  return std::exchange(held, {});
}

CudaGroup::CudaGroup(c10::Device where, std::unique_ptr<CudaCommunicator> communicator,
                     std::shared_ptr<NcclEntry> entry)
    : device(where), nccl(std::move(entry)), communicator_(std::move(communicator)) {
  // NCCL's kernels wait for a lost peer until NCCL is aborted.
  if (nccl) communicator_->when_failed([nccl = nccl] { nccl->abort(); });
}

CudaGroup::CudaGroup(c10::Device where, c10::intrusive_ptr<c10d::Backend> by) : device(where), carrier(std::move(by)) {}

CudaGroup::CudaGroup(c10::Device where, std::shared_ptr<CudaCommunicator> here,
                     std::unique_ptr<NodesCommunicator> nodes, c10::intrusive_ptr<c10d::Backend> by)
    : device(where), carrier(std::move(by)), here_(std::move(here)), nodes_(std::move(nodes)) {}

CudaGroup::~CudaGroup() {
  LineStreams& streams = line_streams();
  const std::lock_guard lock(streams.mutex);
  for (const auto& [number, line] : lines_) {
    for (const auto& own : {line.own, line.own_captured}) {
      if (!own) continue;
      const auto found = streams.used.find({own->device_index(), own->id()});
      if (found != streams.used.end()) streams.used.erase(found);
    }
  }
}

uint64_t CudaGroup::shared_bytes() {
  const auto communicator = watched();
  return communicator ? communicator->shared_bytes() : 0;
}

std::shared_ptr<CudaCommunicator> CudaGroup::communicator() {
  const std::lock_guard lock(life_);
  return communicator_;
}

std::shared_ptr<NodesCommunicator> CudaGroup::nodes() {
  const std::lock_guard lock(life_);
  return nodes_;
}

std::shared_ptr<CudaCommunicator> CudaGroup::watched() {
  const std::lock_guard lock(life_);
  return communicator_ ? communicator_ : here_;
}

c10::Stream CudaGroup::own_stream(Line& line, bool captured) {
  // Captured operations use a separate stream. If a capture included the line's own stream, it would also capture
  // another thread's eager operations on it.
  std::optional<c10::Stream>& own = captured ? line.own_captured : line.own;
  if (!own) {
    LineStreams& streams = line_streams();
    const std::lock_guard lock(streams.mutex);
    for (int draw = 0; draw < 2 * kPoolStreams; ++draw) {
      own = cuda_guard().getStreamFromGlobalPool(device, draw < kPoolStreams);
      if (streams.used.count({own->device_index(), own->id()}) == 0) break;
    }
    streams.used.insert({own->device_index(), own->id()});
  }
  return *own;
}

void CudaGroup::enqueue(const RecordPtr& operation, const Way& way, GroupCore& core, FlightEntry& entry) {
  const c10::OptionalDeviceGuard on_device(device);
  const c10::Stream current = current_stream(device);
  const uint64_t capture = capture_of(current);
  OperationRecord& mine = *operation;
  std::vector<RecordPtr> passed;  // reported and freed outside the lock
  std::vector<RecordPtr> old_captured;
  {
    const std::lock_guard lock(mutex_);
    const auto communicator = this->communicator();
    const auto nodes = this->nodes();
    if (!communicator && !nodes) throw Error(ErrorKind::closed, "the process group was shut down");
    Line& line = lines_[way.line];
    if (capture == 0) look(line, passed, false);
    if (!line.captured.empty() && line.captured.front()->capture != capture) old_captured.swap(line.captured);
    const c10::Stream stream = way.own_stream ? own_stream(line, capture != 0) : current;
    if (stream != current) hand_over(*events_, current, stream, capture != 0);
    RecordPtr& last = capture != 0 ? line.last_captured : line.last;
    if (last && last->capture == capture && *last->on != stream) last->end->block(stream);

    core.number(mine, entry);
    mine.issuer = current, mine.on = stream, mine.capture = capture;
    mine.captured_step = mine.captured_step && capture != 0;
    mine.end = events_->take(capture != 0, way.timed);
    mine.issued = Clock::now();
    if (way.timed && capture == 0) {
      if (!clock_) clock_ = std::make_unique<DeviceClock>(device.index());
      mine.start = events_->take(false, true);
      mine.start->record(stream);
    }
    {
      std::optional<c10::StreamGuard> on_stream;
      if (stream != current) on_stream.emplace(stream);
      mine.context = core.context(mine.name(), mine.sequence(), mine.asked);
      mine.stream = native_stream(stream);
      if (nodes) {
        mine.held.first(*nodes, mine);
      } else if (way.line == kCollectives && nccl && nccl->ready()) {
        SharedCommunicator shared(*communicator, *nccl, mine.even);
        mine.held.first(shared, mine);
      } else {
        mine.held.first(*communicator, mine);
      }
    }
    mine.end->record(stream);
    last = operation;
    if (capture == 0) {
      line.pending.push_back(operation);
    } else {
      line.captured.push_back(operation);
    }
  }
  if (*mine.on == current) mine.release();
  for (const RecordPtr& one : passed) {
    if (completed) completed(*one);
    one->release();
  }
  for (const RecordPtr& one : old_captured) one->release();
}

CudaGroup::RecordPtr CudaGroup::mark(c10d::OpType type, const char* name, uint64_t sequence, SharedEvent start) {
  const c10::Stream current = current_stream(device);
  const auto mine = std::make_shared<OperationRecord>();
  mine->type = type;
  mine->context = {name, sequence};
  mine->issuer = mine->on = current;
  mine->capture = capture_of(current);
  mine->end = events_->take(mine->capture != 0, start != nullptr);
  mine->start = std::move(start);
  mine->issued = Clock::now();
  mine->end->record(current);
  return mine;
}

void CudaGroup::look(Line& line, std::vector<RecordPtr>& passed, bool all) {
  // Operations of a line end in issue order, so one that has ended implies those before it. Abandoned operations hold
  // tensors, so check on every call while there are any.
  const bool eager = all || abandoned_.load(std::memory_order_relaxed) > 0;
  while (!line.pending.empty()) {
    if (!eager && line.pending.size() < std::max(line.look_at, 2 * kBatch)) return;
    const size_t at = eager ? 0 : kBatch - 1;
    if (!line.pending[at]->done()) {
      line.look_at = line.pending.size() + kBatch;
      return;
    }
    line.look_at = 0;
    for (size_t i = 0; i <= at; ++i) {
      line.pending.front()->seen_done = true;
      if (line.pending.front()->abandoned) abandoned_.fetch_sub(1, std::memory_order_relaxed);
      passed.push_back(std::move(line.pending.front()));
      line.pending.pop_front();
    }
  }
}

std::pair<int64_t, int64_t> CudaGroup::times_of(const OperationRecord& operation, bool ended) {
  if (!operation.start || !clock_) return {0, 0};
  try {
    const int64_t start = clock_->time_of(operation.start).value_or(0);
    return {start, ended ? clock_->time_of(operation.end).value_or(0) : 0};
  } catch (const std::exception&) {
    return {0, 0};  // the device has failed; waiters get the error
  }
}

void CudaGroup::abandon(OperationRecord& operation) {
  // Synchronous operations hold nothing, captured ones are kept with their capture, and ended ones have released their
  // tensors.
  if (operation.on == operation.issuer || operation.capture != 0 || operation.seen_done) return;
  if (!operation.abandoned.exchange(true)) abandoned_.fetch_add(1, std::memory_order_relaxed);
}

void CudaGroup::look() {
  std::vector<RecordPtr> passed;
  try {
    // A lock holder may be waiting for this thread, so never block here; a later look does the work.
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;
    for (auto& [number, line] : lines_) {
      look(line, passed, true);
      if (line.pending.empty()) continue;
      const RecordPtr& running = line.pending.front();
      if (!running->start || running->told_started || !has_passed(running->start)) continue;
      running->told_started = true;
      if (started) started(*running);
    }
  } catch (const std::exception&) {
    // The device has failed; waiters get the error.
  }
  for (const RecordPtr& one : passed) {
    if (completed) completed(*one);
    one->release();
  }
}

void CudaGroup::check(const OperationContext& context) {
  if (const auto communicator = watched()) communicator->check(context);
}

bool CudaGroup::failed(const OperationContext& context, std::exception_ptr& error) {
  try {
    check(context);
    return false;
  } catch (...) {
    error = std::current_exception();
    return true;
  }
}

void CudaGroup::abort() {
  if (carrier) carrier->abort();
  if (nccl) nccl->abort();
  if (const auto communicator = watched()) communicator->abort();
}

bool CudaGroup::drain(Clock::time_point until) {
  for (auto pause = std::chrono::microseconds(20);; pause = std::min(pause * 2, std::chrono::microseconds(1000))) {
    look();
    {
      const std::lock_guard lock(mutex_);
      const bool idle = std::all_of(lines_.begin(), lines_.end(), [](auto& entry) {
        try {
          Line& line = entry.second;
          return line.pending.empty() || line.pending.back()->done();
        } catch (const std::exception&) {
          return true;  // a failed device runs nothing
        }
      });
      if (idle) break;
    }
    if (Clock::now() >= until) return false;
    std::this_thread::sleep_for(pause);
  }
  look();
  return true;
}

std::optional<std::string> CudaGroup::wait_told(Clock::time_point until) {
  const auto communicator = watched();
  return communicator ? communicator->wait_told(until) : std::nullopt;
}

void CudaGroup::close(bool drained) {
  std::vector<OperationRecord::Held> garbage;
  std::shared_ptr<CudaCommunicator> gone;
  std::shared_ptr<NodesCommunicator> gone_nodes;
  {
    const std::lock_guard lock(mutex_);
    const std::lock_guard life(life_);
    for (auto& [number, line] : lines_) {
      for (const RecordPtr& one : line.pending) garbage.push_back(one->release());
      for (const RecordPtr& one : line.captured) garbage.push_back(one->release());
      line.pending.clear();
      line.captured.clear();
      line.last.reset();
      line.last_captured.reset();
    }
    gone = communicator_ ? std::move(communicator_) : std::move(here_);
    gone_nodes = std::move(nodes_);
  }
  // Its memory goes before the node's communicator, which would wait for graphs that still run.
  if (gone_nodes && !(drained && gone->settle())) new std::shared_ptr<NodesCommunicator>(std::move(gone_nodes));
  if (!drained && gone) new std::shared_ptr<CudaCommunicator>(std::move(gone));
}

}  // namespace ark
