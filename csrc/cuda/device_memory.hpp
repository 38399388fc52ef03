// GPU memory that other GPUs and processes of this node can map, through the driver's virtual memory API.
//
// A DeviceMemory owns an address range with memory behind it: its own (allocate), a peer's (import), or pinned host
// memory near the device (allocate_on_host), which GPUs without peer access also reach. export_fd() creates an
// allocation's descriptor, which travels over a local socket. Memory of a device is made for NICs, too, where the
// driver offers that (gpuDirectRDMACapable). The memory lives until the last process releases it. All functions
// preserve the calling thread's context and any capture.
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

  // Allocates at least `bytes` on this device, zeroed. Throws Error(system) with size and remedy if memory is short.
  static DeviceMemory allocate(int device, size_t bytes, const char* remedy = kFreeSome);
  // The same with undefined contents; returns nothing if the device has too little memory.
  static std::optional<DeviceMemory> try_allocate(int device, size_t bytes);
  static DeviceMemory allocate_on_host(int device, size_t bytes);  // zeroed
  // Maps a peer's allocation of exactly `bytes` for kernels of `device`.
  static DeviceMemory import(int device, const UniqueFd& fd, size_t bytes);

  UniqueFd export_fd() const;
  // Gives access to other devices of this process that reach the memory, as PyTorch does for its own memory.
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

// Zeroed host memory that kernels of every device of this process read and write.
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
