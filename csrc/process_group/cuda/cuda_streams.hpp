// CUDA streams, events and captures through c10's device-generic classes and the driver, without CUDA headers.
//
// Events come from a pool, because creating one costs more than enqueueing a collective should. An event recorded
// during capture is never reused: CUDA refuses to query it outside the capture. Timed and untimed events are separate.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <mutex>
#include <vector>

namespace ark {

// PyTorch's view of CUDA streams. Throws if PyTorch has no CUDA.
inline c10::impl::VirtualGuardImpl cuda_guard() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA);
}

c10::Stream current_stream(c10::Device device);
void* native_stream(const c10::Stream& stream);  // returns the CUstream

// The id of the capture that this stream is part of; 0: none. Ids are unique in a process.
uint64_t capture_of(const c10::Stream& stream);

// Returns true if the calling thread's current stream of this device is capturing.
bool is_capturing(c10::Device device);

using SharedEvent = std::shared_ptr<c10::Event>;

// Returns true if the device has passed the event. Allowed while another thread captures. Throws if the device has
// failed.
bool has_passed(const SharedEvent& event);

class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  // The last owner returns the event to the pool; a captured event is destroyed instead.
  SharedEvent take(bool captured, bool timed = false);

 private:
  static constexpr size_t kMost = 256;
  std::mutex mutex_;
  std::vector<std::unique_ptr<c10::Event>> free_[2];  // untimed, timed
};

// Makes `later` wait for everything enqueued on `earlier` so far.
void hand_over(EventPool& pool, const c10::Stream& earlier, const c10::Stream& later, bool captured);

}  // namespace ark
