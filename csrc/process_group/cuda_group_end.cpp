// Failure and end of a group's side on its device: checks, abort, waiting until the device is done, freeing.
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <condition_variable>
#include <thread>

#include "jit/driver.hpp"
#include "process_group/cuda_group.hpp"

namespace ark {

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
