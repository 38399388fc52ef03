// Tells when a device passed an event, on this process's steady clock, for the flight record and for durations.
//
// CUDA only reports the distance of two events, as a float in milliseconds. So the clock keeps one event whose time is
// known. The first is on the clock's own stream, and the host waits for it once. Later it moves to the last queried
// event whenever the distance grows so large that microseconds would be lost.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>

#include "cuda/cuda_types.hpp"
#include "process_group/cuda/cuda_streams.hpp"

namespace ark {

class DeviceClock {
 public:
  explicit DeviceClock(int device);
  ~DeviceClock();
  DeviceClock(const DeviceClock&) = delete;
  DeviceClock& operator=(const DeviceClock&) = delete;

  // Nanoseconds on the steady clock, or none if the clock could not be set. The event must be timed and passed.
  std::optional<int64_t> time_of(const SharedEvent& event);

 private:
  static constexpr float kFar = 5000;  // in milliseconds; a float resolves half a microsecond there

  const int device_;
  std::mutex mutex_;
  CUevent first_ = nullptr;  // the reference until `known_` is set
  SharedEvent known_;
  std::optional<int64_t> at_;  // time of first_ or known_
};

}  // namespace ark
