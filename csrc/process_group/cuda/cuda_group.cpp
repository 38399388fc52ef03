// The order of operations on the device, and the streams and events that make it. See the header.
#include "process_group/cuda/cuda_group.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <set>

namespace ark {

namespace {

// A query of the device costs more than an entry: they are looked at in batches, and a device that lags behind is asked
// again when as many have come again.
constexpr size_t kBatch = 16;

// Streams of the pool that lines of this process use. Two lines on one stream could wait for each other (a large send
// before the receive that the peer waits for), and PyTorch hands out the same few streams in turn.
struct LineStreams {
  std::mutex mutex;
  std::multiset<std::pair<c10::DeviceIndex, c10::StreamId>> used;
};
LineStreams& line_streams() {
  static auto* streams = new LineStreams;
  return *streams;
}
constexpr int kPoolStreams = 32;  // of each priority

}  // namespace

bool Enqueued::done() {
  if (capture != 0 || seen_done.load(std::memory_order_acquire)) return true;
  if (!has_passed(end)) return false;
  seen_done.store(true, std::memory_order_release);
  return true;
}

std::shared_ptr<void> Enqueued::release() {
  const std::lock_guard lock(mutex);
  return std::move(kept);
}

CudaGroup::CudaGroup(c10::Device where, std::unique_ptr<CudaCommunicator> communicator,
                     std::shared_ptr<NcclEntry> entry)
    : device(where), nccl(std::move(entry)), communicator_(std::move(communicator)) {
  // Its kernels wait for a lost peer until they are told.
  if (nccl) communicator_->when_failed([nccl = nccl] { nccl->abort(); });
}

CudaGroup::CudaGroup(c10::Device where, c10::intrusive_ptr<c10d::Backend> by) : device(where), carrier(std::move(by)) {}

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
  const auto communicator = this->communicator();
  return communicator ? communicator->shared_bytes() : 0;
}

std::shared_ptr<CudaCommunicator> CudaGroup::communicator() {
  const std::lock_guard lock(life_);
  return communicator_;
}

c10::Stream CudaGroup::own_stream(Line& line, bool captured) {
  // Captured operations have a stream of their own: an eager operation of another thread, on a stream that a capture
  // has taken in, would be captured with it.
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

CudaGroup::EnqueuedPtr CudaGroup::enqueue(Request request, Number number, Body body) {
  const c10::OptionalDeviceGuard on_device(device);
  const c10::Stream current = current_stream(device);
  const uint64_t capture = capture_of(current);
  std::vector<EnqueuedPtr> passed;  // told, and freed, without the lock
  std::vector<EnqueuedPtr> old_captured;
  EnqueuedPtr mine;
  {
    const std::lock_guard lock(mutex_);
    const auto communicator = this->communicator();
    if (!communicator) throw Error(ErrorKind::closed, "the process group was shut down");
    Line& line = lines_[request.line];
    if (capture == 0) look(line, passed, false);
    if (!line.captured.empty() && line.captured.front()->capture != capture) old_captured.swap(line.captured);
    const c10::Stream stream = request.own_stream ? own_stream(line, capture != 0) : current;
    if (stream != current) hand_over(*events_, current, stream, capture != 0);
    EnqueuedPtr& last = capture != 0 ? line.last_captured : line.last;
    if (last && last->capture == capture && last->stream != stream) last->end->block(stream);

    const auto [sequence, flight] = number();
    mine = std::shared_ptr<Enqueued>(new Enqueued{.issuer = current,
                                                  .stream = stream,
                                                  .capture = capture,
                                                  .start = {},
                                                  .end = events_->take(capture != 0, request.timed),
                                                  .type = request.type,
                                                  .name = request.name,
                                                  .sequence = sequence,
                                                  .flight = flight,
                                                  .issued = Clock::now()});
    if (request.timed && capture == 0) {
      if (!clock_) clock_ = std::make_unique<DeviceClock>(device.index());
      mine->start = events_->take(false, true);
      mine->start->record(stream);
    }
    {
      std::optional<c10::StreamGuard> on_stream;
      if (stream != current) on_stream.emplace(stream);
      body(*communicator, native_stream(stream), sequence);
    }
    mine->end->record(stream);
    if (stream != current) mine->kept = std::move(request.keep);
    last = mine;
    if (capture == 0) {
      line.pending.push_back(mine);
    } else {
      line.captured.push_back(mine);
    }
  }
  for (const EnqueuedPtr& one : passed) {
    if (completed) completed(*one);
    one->release();
  }
  for (const EnqueuedPtr& one : old_captured) one->release();
  return mine;
}

CudaGroup::EnqueuedPtr CudaGroup::mark(c10d::OpType type, const char* name, uint64_t sequence, SharedEvent start) {
  const c10::Stream current = current_stream(device);
  const uint64_t capture = capture_of(current);
  const bool timed = start != nullptr;
  const std::shared_ptr<Enqueued> mine(new Enqueued{.issuer = current,
                                                    .stream = current,
                                                    .capture = capture,
                                                    .start = std::move(start),
                                                    .end = events_->take(capture != 0, timed),
                                                    .type = type,
                                                    .name = name,
                                                    .sequence = sequence,
                                                    .flight = 0,
                                                    .issued = Clock::now()});
  mine->end->record(current);
  return mine;
}

void CudaGroup::look(Line& line, std::vector<EnqueuedPtr>& passed, bool all) {
  // The operations of a line end in the order of issue, so one that has ended speaks for those before it. Abandoned
  // ones hold tensors: while there are any, every call looks.
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

std::pair<int64_t, int64_t> CudaGroup::times_of(const Enqueued& operation, bool ended) {
  if (!operation.start || !clock_) return {0, 0};
  try {
    const int64_t start = clock_->time_of(operation.start).value_or(0);
    return {start, ended ? clock_->time_of(operation.end).value_or(0) : 0};
  } catch (const std::exception&) {
    return {0, 0};  // the device has failed; whoever waits for it is told
  }
}

void CudaGroup::abandon(Enqueued& operation) {
  // A synchronous one holds nothing, a captured one is held with its capture, and one that has ended has let go.
  if (operation.stream == operation.issuer || operation.capture != 0 || operation.seen_done) return;
  if (!operation.abandoned.exchange(true)) abandoned_.fetch_add(1, std::memory_order_relaxed);
}

void CudaGroup::look() {
  std::vector<EnqueuedPtr> passed;
  try {
    // Who looks may be a thread that someone waits for with the lock held: it then comes back another time.
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;
    for (auto& [number, line] : lines_) {
      look(line, passed, true);
      if (line.pending.empty()) continue;
      const EnqueuedPtr& running = line.pending.front();
      if (!running->start || running->told_started || !has_passed(running->start)) continue;
      running->told_started = true;
      if (started) started(*running);
    }
  } catch (const std::exception&) {
    // The device has failed; whoever waits for it is told.
  }
  for (const EnqueuedPtr& one : passed) {
    if (completed) completed(*one);
    one->release();
  }
}

}  // namespace ark
