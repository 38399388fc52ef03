// Streams, events and captures of CUDA through c10's device-generic classes and the driver: no header of CUDA.
//
// Events come from a pool, since making one costs more than an enqueued collective should. An event that was recorded
// under capture is never used again: outside of its capture CUDA refuses to query it. Events that take times are others
// than those that do not.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <mutex>
#include <vector>

namespace ark {

// The streams of CUDA as PyTorch sees them. Throws where PyTorch has no CUDA.
inline c10::impl::VirtualGuardImpl cuda_guard() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA);
}

c10::Stream current_stream(c10::Device device);
void* native_stream(const c10::Stream& stream);  // the CUstream

// The capture that this stream takes part in; 0: none. Ids are never used twice in a process.
uint64_t capture_of(const c10::Stream& stream);

// Is the calling thread's current stream of this device capturing a graph?
bool is_capturing(c10::Device device);

using SharedEvent = std::shared_ptr<c10::Event>;

// Whether the device has passed the event; allowed while some thread captures. Throws when the device has failed.
bool has_passed(const SharedEvent& event);

class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  // Back in the pool when the last owner lets go; a captured one is destroyed instead.
  SharedEvent take(bool captured, bool timed = false);

 private:
  static constexpr size_t kMost = 256;
  std::mutex mutex_;
  std::vector<std::unique_ptr<c10::Event>> free_[2];  // without and with times
};

// Makes `later` wait for all that is enqueued on `earlier` so far.
void hand_over(EventPool& pool, const c10::Stream& earlier, const c10::Stream& later, bool captured);

}  // namespace ark
