// Copies by a GPU's copy engines that the host waits for: puts to windows of GPU memory in a node.
#pragma once

#include <chrono>
#include <cstddef>

#include "cuda/driver.hpp"

namespace ark {

// On a stream of its own. Thread-safe.
class GpuCopies {
 public:
  using Clock = std::chrono::steady_clock;
  explicit GpuCopies(int device);
  ~GpuCopies();
  GpuCopies(const GpuCopies&) = delete;
  GpuCopies& operator=(const GpuCopies&) = delete;

  // Memory of any device that this one reaches, or of the host. Returns false at the deadline; the copy then still
  // runs.
  bool copy(void* to, const void* from, size_t bytes, Clock::time_point deadline);

 private:
  const int device_;
  CUstream stream_ = nullptr;
};

}  // namespace ark
