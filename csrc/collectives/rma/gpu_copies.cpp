// Driver calls for gpu_copies.hpp.
#include "collectives/rma/gpu_copies.hpp"

#include <thread>

#include "util/error.hpp"

namespace ark {

namespace {

constexpr auto kPoll = std::chrono::microseconds(10);

CUdeviceptr pointer_of(const void* address) {
  return static_cast<CUdeviceptr>(reinterpret_cast<uintptr_t>(address));
}

// Gives the event back whatever happens.
struct CopyEvent {
  CUevent event = nullptr;
  CopyEvent() { check(driver().event_create(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate"); }
  ~CopyEvent() { driver().event_destroy(event); }
};

}  // namespace

GpuCopies::GpuCopies(int device) : device_(device) {
  const RelaxedCapture relaxed;
  const CurrentContext context(device_);
  check(driver().stream_create_with_priority(&stream_, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority");
}

GpuCopies::~GpuCopies() {
  try {
    const RelaxedCapture relaxed;
    const CurrentContext context(device_);
    driver().stream_destroy(stream_);  // what it has to do still ends
  } catch (const Error&) {             // at exit the driver may be gone
  }
}

bool GpuCopies::copy(void* to, const void* from, size_t bytes, Clock::time_point deadline) {
  const RelaxedCapture relaxed;
  const CurrentContext context(device_);
  const CopyEvent copied;
  check(driver().memcpy_async(pointer_of(to), pointer_of(from), bytes, stream_), "cuMemcpyAsync of a put");
  check(driver().event_record(copied.event, stream_), "cuEventRecord");
  while (true) {
    const CUresult result = driver().event_query(copied.event);
    if (result == CUDA_SUCCESS) return true;
    if (result != CUDA_ERROR_NOT_READY) check(result, "a put between GPUs");
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kPoll);
  }
}

}  // namespace ark
