// Memory that a GPU and those of other processes of this node can map, from the driver's virtual memory API.
//
// A DeviceMemory owns an address range of one device with memory behind it: its own (allocate) or a peer's (import); or
// pinned memory of the host, near the device (allocate_on_host), which GPUs without peer access reach, too.
// The descriptor of an allocation is made by export_fd() and travels over a local socket; the memory lives until the
// last process has let go of it. All functions leave the calling thread's context and any capture as they are.
#pragma once

#include <cstddef>
#include <optional>

#include "cuda/driver.hpp"
#include "util/unique_fd.hpp"

namespace ark {

class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  ~DeviceMemory();  // nothing may use it any more

  // At least `bytes` on this device, zeroed. Error(system) with size and remedy when there is not enough.
  static DeviceMemory allocate(int device, size_t bytes, const char* remedy = kFreeSome);
  // The same with any contents; nothing where the device has not enough.
  static std::optional<DeviceMemory> try_allocate(int device, size_t bytes);
  static DeviceMemory allocate_on_host(int device, size_t bytes);  // zeroed
  // Maps a peer's allocation of exactly `bytes` for kernels of `device`.
  static DeviceMemory import(int device, const UniqueFd& fd, size_t bytes);

  UniqueFd export_fd() const;
  // Other devices of this process that reach the memory may use it too, as they may PyTorch's own.
  void open_to_peers() const;
  char* data() const { return reinterpret_cast<char*>(pointer_); }
  size_t size() const { return bytes_; }

 private:
  static constexpr const char* kFreeSome =
      "Free memory on this device before the group's first collective on CUDA tensors.";
  static std::optional<DeviceMemory> made(int device, size_t bytes, bool on_host);
  void map(size_t bytes);
  void zero();

  int device_ = -1;
  CUdeviceptr pointer_ = 0;
  size_t bytes_ = 0;
  CUmemGenericAllocationHandle handle_ = 0;
};

// Host memory that kernels of every device of this process read and write; zeroed.
class PinnedMemory {
 public:
  PinnedMemory(int device, size_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  void* host() const { return host_; }
  void* device() const { return reinterpret_cast<void*>(device_); }

 private:
  int ordinal_;
  void* host_ = nullptr;
  CUdeviceptr device_ = 0;
};

}  // namespace ark
