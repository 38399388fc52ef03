// Sets and reads the device clock.
#include "process_group/cuda/device_clock.hpp"

#include <chrono>
#include <thread>

#include "cuda/driver.hpp"
#include "util/error.hpp"

namespace ark {

namespace {

constexpr auto kPatience = std::chrono::milliseconds(50);  // a device this busy is not asked again

int64_t now_ns() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

DeviceClock::DeviceClock(int device) : device_(device) {
  const RelaxedCapture relaxed;
  const CurrentContext context(device);
  CUstream stream = nullptr;
  check(driver().stream_create_with_priority(&stream, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority");
  CUresult result = driver().event_create(&first_, 0);
  // Two rounds, because the first is slow.
  for (int round = 0; round < 2 && result == CUDA_SUCCESS; ++round) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    const int64_t before = now_ns();
    result = driver().event_record(first_, stream);
    if (result != CUDA_SUCCESS) break;
    at_.reset();
    while ((result = driver().event_query(first_)) == CUDA_ERROR_NOT_READY && std::chrono::steady_clock::now() < until)
      std::this_thread::yield();
    if (result == CUDA_SUCCESS) at_ = before + (now_ns() - before) / 2;
  }
  driver().stream_destroy(stream);
  if (result != CUDA_ERROR_NOT_READY) check(result, "setting the clock of device " + std::to_string(device));
}

DeviceClock::~DeviceClock() {
  try {
    const RelaxedCapture relaxed;
    const CurrentContext context(device_);
    driver().event_destroy(first_);
  } catch (const Error&) {  // at exit the driver may be gone
  }
}

std::optional<int64_t> DeviceClock::time_of(const SharedEvent& event) {
  const std::lock_guard lock(mutex_);
  if (!at_) return std::nullopt;
  const RelaxedCapture relaxed;
  const CurrentContext context(device_);
  const CUevent known = known_ ? static_cast<CUevent>(known_->eventId()) : first_;
  float milliseconds = 0;
  check(driver().event_elapsed_time(&milliseconds, known, static_cast<CUevent>(event->eventId())),
        "cuEventElapsedTime");
  const int64_t time = *at_ + static_cast<int64_t>(static_cast<double>(milliseconds) * 1e6);
  if (milliseconds > kFar) {
    known_ = event;
    at_ = time;
  }
  return time;
}

}  // namespace ark
