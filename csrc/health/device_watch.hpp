// Passes failures between host and device: tells kernels of a failed group to leave, and fails the group of a kernel
// that gave up.
//
// One thread for all groups checks two words of each, ten times a second. It starts with the first group on a GPU.
// Waiting kernels read the abort word themselves, so they notice a lost peer at once. The thread never waits and never
// calls the driver or the CUDA runtime, which may block until a user's copy ends that itself waits for this thread
// (collectives/cuda/copy_engine/copy_engine.hpp). Reports that may block run on their own threads, after the release.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "cuda/packet.cuh"
#include "health/group_health.hpp"

namespace ark {

// The rank that stuck copy engines wait for, if known.
struct EngineDiagnosis {
  int peer = -1;
  bool mismatched = false;  // its output is at another place of registered memory than this rank's
};

class DeviceWatch {
 public:
  using Hear = std::function<void(const Error&)>;
  // `status` is in memory that the device writes; it and `health` must outlive this object. `log` reports a device that
  // gave up, on its own thread, and may block. `note` is called earlier, while the device still waits, and must not
  // block.
  DeviceWatch(GroupHealth& health, device::GroupStatus* status, Hear log, Hear note = {});
  ~DeviceWatch();  // waits until all reports are done
  // As FailureLog::wait_told, for `log`.
  std::optional<std::string> wait_told(Clock::time_point until) const;

  // Looks now. Throws the error that failed the group, reworded for this operation.
  void check(const OperationContext& context);
  void abort();  // makes kernels leave

  // Watches copy engines that wait on words of memory. They fail the group if they are busy without progress for
  // `limit`, if the awaited peer left without issuing what this rank has, or if a peer passed mismatched memory;
  // `diagnose` finds that out. After a failure, every look calls `release` to end their waits. Neither callback may
  // call the driver. Lasts until forget_engine() returns.
  void watch_engine(device::EngineStatus* status, std::function<void()> release,
                    std::function<EngineDiagnosis()> diagnose);
  void engine_used(std::chrono::milliseconds limit);  // of a new operation; until idle the longest counts
  void forget_engine();

  // Called at the end of every look once the group has failed. Must not block.
  void when_failed(std::function<void()> then);

 private:
  struct Watched;
  std::shared_ptr<Watched> watched_;
};

}  // namespace ark
