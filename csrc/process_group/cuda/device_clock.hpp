// When a device passed an event, on this process's steady clock: for the flight record and for whoever asks how long an
// operation took.
//
// Events know only how far apart they are, as a float of milliseconds. The clock therefore keeps one event whose time
// is known: at first one on a stream of its own, for which the host waits once; later the last one asked about, when
// the distance grows so long that microseconds would be lost.
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

  // Nanoseconds of the steady clock; none where the clock could not be set. The event takes times and has passed.
  std::optional<int64_t> time_of(const SharedEvent& event);

 private:
  static constexpr float kFar = 5000;  // milliseconds; a float tells half a microsecond there

  const int device_;
  std::mutex mutex_;
  CUevent first_ = nullptr;  // known until `known_` is set
  SharedEvent known_;
  std::optional<int64_t> at_;  // of first_ or known_
};

}  // namespace ark
