// Each function here is one or two calls of c10 or of the driver.
#include "process_group/cuda/cuda_streams.hpp"

#include <c10/core/DeviceGuard.h>

#include "cuda/driver.hpp"

namespace ark {

c10::Stream current_stream(c10::Device device) {
  return cuda_guard().getStream(device);
}

void* native_stream(const c10::Stream& stream) {
  return cuda_guard().getStreamNativeHandle(stream);
}

uint64_t capture_of(const c10::Stream& stream) {
  // The default stream's handle is null, and the driver resolves it in the current context.
  const CurrentContext context(stream.device_index());
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  uint64_t id = 0;
  check(driver().stream_get_capture_info(static_cast<CUstream>(native_stream(stream)), &status, &id, nullptr, nullptr,
                                         nullptr, nullptr),
        "cuStreamGetCaptureInfo");
  return status == CU_STREAM_CAPTURE_STATUS_NONE ? 0 : id + 1;
}

bool is_capturing(c10::Device device) {
  return capture_of(current_stream(device)) != 0;
}

bool has_passed(const SharedEvent& event) {
  const c10::OptionalDeviceGuard on_device(event->device());
  const RelaxedCapture relaxed;
  return event->query();
}

SharedEvent EventPool::take(bool captured, bool timed) {
  const auto flag = timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT;
  if (captured) return std::make_shared<c10::Event>(c10::DeviceType::CUDA, flag);
  std::unique_ptr<c10::Event> event;
  {
    const std::lock_guard lock(mutex_);
    if (auto& free = free_[timed]; !free.empty()) {
      event = std::move(free.back());
      free.pop_back();
    }
  }
  if (!event) event = std::make_unique<c10::Event>(c10::DeviceType::CUDA, flag);
  return SharedEvent(event.release(), [pool = shared_from_this(), timed](c10::Event* returned) {
    std::unique_ptr<c10::Event> owned(returned);
    const std::lock_guard lock(pool->mutex_);
    if (auto& free = pool->free_[timed]; free.size() < kMost) free.push_back(std::move(owned));
  });
}

void hand_over(EventPool& pool, const c10::Stream& earlier, const c10::Stream& later, bool captured) {
  const SharedEvent event = pool.take(captured);
  event->record(earlier);
  event->block(later);
}

}  // namespace ark
