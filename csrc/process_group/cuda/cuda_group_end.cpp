// Failure and end of a group's side on its device: checks, abort, waiting until the device is done, freeing.
#include <algorithm>
#include <thread>

#include "process_group/cuda/cuda_group.hpp"

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
  if (nccl) nccl->abort();
  if (const auto communicator = this->communicator()) communicator->abort();
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
          return true;  // a device that has failed runs nothing any more
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
  const auto communicator = this->communicator();
  return communicator ? communicator->wait_told(until) : std::nullopt;
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
