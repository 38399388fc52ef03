// Carries bad news between host and device: a failed group's kernels are told to leave, and a kernel that gave up
// fails its group.
//
// One thread for all groups of the process looks ten times a second at two words of each. It starts with the first
// group on a GPU. Kernels look at the abort word themselves while they wait, so a lost peer ends them within a slice.
//
// That thread never waits: what it does are loads and stores of host memory, and starting threads. Above all it calls
// neither driver nor CUDA runtime, which may hold it up until a user's copy has ended, and that waits for this thread
// (collectives/cuda/copy_engine/copy_engine.hpp). What may block, telling others of a failure, has a thread of its own,
// after the release.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "cuda/packet.cuh"
#include "health/group_health.hpp"

namespace ark {

// Whom copy engines that do not move wait for, as far as it can be told.
struct EngineDiagnosis {
  int peer = -1;
  bool mismatched = false;  // its output is registered memory at another place than this rank's
};

class DeviceWatch {
 public:
  using Hear = std::function<void(const Error&)>;
  // `status` is in memory that the device writes; both outlive this object. `log` is told of a device that gave up, by
  // a thread of its own: it may block. `note` hears of it before, while the device still waits, and must not block.
  DeviceWatch(GroupHealth& health, device::GroupStatus* status, Hear log, Hear note = {});
  ~DeviceWatch();  // when all is told
  // As FailureLog's, of `log`.
  std::optional<std::string> wait_told(Clock::time_point until) const;

  // Looks now. Throws what failed the group, told for this operation.
  void check(const OperationContext& context);
  void abort();  // kernels leave

  // Copy engines that wait on words of memory: they fail the group when they are busy without progress for `limit`,
  // when the peer they wait for left the group without having issued what this rank has, or when a peer passed what
  // does not belong to what this rank passed; `diagnose` says so. Once the group has failed `release` is called in
  // every look, to let their waits end. Neither may call the driver. Until forget_engine() returns.
  void watch_engine(device::EngineStatus* status, std::function<void()> release,
                    std::function<EngineDiagnosis()> diagnose);
  void engine_used(std::chrono::milliseconds limit);  // by the operation just enqueued; until idle the longest counts
  void forget_engine();

  // Called at the end of every look once the group has failed. Must not block.
  void when_failed(std::function<void()> then);

 private:
  struct Watched;
  std::shared_ptr<Watched> watched_;
};

}  // namespace ark
