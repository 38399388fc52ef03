// The order of operations on the device, and the streams and events that make it. See the header.
#include "process_group/cuda_group.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <condition_variable>
#include <set>
#include <thread>

#include "jit/driver.hpp"

namespace ark {

namespace {

// A query of the device costs more than an entry: they are looked at in batches.
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

CudaGroup::CudaGroup(c10::Device where, std::unique_ptr<CudaCommunicator> communicator)
    : device(where), communicator_(std::move(communicator)) {}

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

CudaGroup::EnqueuedPtr CudaGroup::enqueue(Request request,
                                          const std::function<void(CudaCommunicator&, void*, uint64_t)>& body) {
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

    const auto [sequence, flight] = request.number();
    mine = std::shared_ptr<Enqueued>(new Enqueued{.stream = stream,
                                                  .own_stream = stream != current,
                                                  .capture = capture,
                                                  .start = {},
                                                  .end = events_->take(capture != 0, request.timed),
                                                  .type = request.type,
                                                  .name = request.name,
                                                  .sequence = sequence,
                                                  .flight = flight,
                                                  .issued = Clock::now()});
    if (request.timed && capture == 0) {
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
      captured_any_ = true;
    }
  }
  for (const EnqueuedPtr& one : passed) {
    if (completed) completed(*one);
    one->release();
  }
  for (const EnqueuedPtr& one : old_captured) one->release();
  return mine;
}

void CudaGroup::look(Line& line, std::vector<EnqueuedPtr>& passed, bool all) {
  // The operations of a line end in the order of issue, so one that has ended speaks for those before it. Abandoned
  // ones hold tensors: while there are any, every call looks.
  const bool eager = all || abandoned_.load(std::memory_order_relaxed) > 0;
  while (!line.pending.empty()) {
    if (!eager && line.pending.size() < 2 * kBatch) return;
    const size_t at = eager ? 0 : kBatch - 1;
    if (!line.pending[at]->done()) return;
    for (size_t i = 0; i <= at; ++i) {
      if (line.pending.front()->abandoned) abandoned_.fetch_sub(1, std::memory_order_relaxed);
      passed.push_back(std::move(line.pending.front()));
      line.pending.pop_front();
    }
  }
}

void CudaGroup::abandon(Enqueued& operation) {
  if (!operation.own_stream || operation.capture != 0) return;  // holds nothing, or is held with its capture
  operation.abandoned = true;
  abandoned_.fetch_add(1, std::memory_order_relaxed);
}

void CudaGroup::look() {
  std::vector<EnqueuedPtr> passed;
  try {
    // Who looks may be a thread that someone waits for with the lock held: it then comes back another time.
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;
    for (auto& [number, line] : lines_) look(line, passed, true);
  } catch (const std::exception&) {
    // The device has failed; whoever waits for it is told.
  }
  for (const EnqueuedPtr& one : passed) {
    if (completed) completed(*one);
    one->release();
  }
}

void CudaGroup::check(const OperationContext& context) {
  if (const auto communicator = this->communicator()) communicator->check(context);
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
  if (const auto communicator = this->communicator()) communicator->abort();
}

// Graphs may be running that hold operations of the group, on streams unknown here: all of the device is waited for, on
// a thread of its own, since CUDA has no bound for that.
bool CudaGroup::drain_graphs(Clock::time_point until) {
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  auto state = std::make_shared<State>();
  std::thread([state, device = device] {
    try {
      const c10::OptionalDeviceGuard on_device(device);
      const RelaxedCapture relaxed;
      cuda_guard().synchronizeDevice(device.index());
    } catch (const std::exception&) {
      // a device that has failed runs nothing any more
    }
    const std::lock_guard lock(state->mutex);
    state->done = true;
    state->changed.notify_all();
  }).detach();
  std::unique_lock lock(state->mutex);
  return state->changed.wait_until(lock, until, [&] { return state->done; });
}

bool CudaGroup::drain(Clock::time_point until) {
  if (captured_any_ && !drain_graphs(until)) return false;
  for (auto pause = std::chrono::microseconds(20);; pause = std::min(pause * 2, std::chrono::microseconds(1000))) {
    look();
    {
      const std::lock_guard lock(mutex_);
      const bool idle = std::all_of(lines_.begin(), lines_.end(), [](auto& entry) {
        try {
          Line& line = entry.second;
          return line.pending.empty() || line.pending.back()->done();
        } catch (const std::exception&) {
          return true;  // a device that has failed runs nothing any more
        }
      });
      if (idle) return true;
    }
    if (Clock::now() >= until) return false;
    std::this_thread::sleep_for(pause);
  }
}

void CudaGroup::close(bool drained) {
  std::vector<std::shared_ptr<void>> garbage;
  std::shared_ptr<CudaCommunicator> gone;
  {
    const std::lock_guard lock(mutex_);
    const std::lock_guard life(life_);
    for (auto& [number, line] : lines_) {
      for (const EnqueuedPtr& one : line.pending) garbage.push_back(one->release());
      for (const EnqueuedPtr& one : line.captured) garbage.push_back(one->release());
      line.pending.clear();
      line.captured.clear();
      line.last.reset();
      line.last_captured.reset();
    }
    gone = std::move(communicator_);
  }
  if (!drained && gone) new std::shared_ptr<CudaCommunicator>(std::move(gone));
}

}  // namespace ark
