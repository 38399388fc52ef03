// Carries bad news between host and device: a failed group's kernels are told to leave, and a kernel that gave up
// fails its group.
//
// One thread for all groups of the process looks ten times a second at two words of each. It starts with the first
// group on a GPU. Kernels look at the abort word themselves while they wait, so a lost peer ends them within a slice.
#pragma once

#include <functional>
#include <memory>

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
  // `status` is in memory that the device writes; both outlive this object. `log` is told of a device that gave up.
  DeviceWatch(GroupHealth& health, device::GroupStatus* status, std::function<void(const Error&)> log);
  ~DeviceWatch();

  // Looks now. Throws what failed the group, told for this operation.
  void check(const OperationContext& context);
  void abort();  // kernels leave

  // Copy engines that wait on words of memory: they fail the group when they are busy without progress for `limit`,
  // when the peer they wait for left the group without having issued what this rank has, or when a peer passed what
  // does not belong to what this rank passed; `diagnose` says so. Once the group has failed `release` is called in
  // every look, to let their waits end. Until forget_engine() returns.
  void watch_engine(device::EngineStatus* status, std::function<void()> release,
                    std::function<EngineDiagnosis()> diagnose);
  void engine_used(std::chrono::milliseconds limit);  // by the operation just enqueued; until idle the longest counts
  void forget_engine();

  // Called in every look once the group has failed. Must not block.
  void when_failed(std::function<void()> then);

 private:
  struct Watched;
  std::shared_ptr<Watched> watched_;
};

}  // namespace ark
