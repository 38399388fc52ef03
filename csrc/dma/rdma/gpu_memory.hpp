// GPU memory for the NIC: as a dma-buf that the CUDA driver exports and libibverbs registers, where both can do so.
//
// Where they cannot, kernels exchange through pinned host memory (gpu_window.hpp). The NIC's writes must also be
// visible to kernels that start after the host has heard of them, which the driver states as a device attribute.
#pragma once

#include <string>

#include "dma/rdma/device.hpp"

namespace ark::rdma {

constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

struct GpuPath {
  bool direct = false;  // false: through pinned host memory
  std::string reason;   // why not directly; empty if direct
};

// Finds the path between a CUDA device and a NIC. Registers a small allocation to find out; does not throw.
GpuPath gpu_path(const Device& nic, int gpu);

// The driver's id of the allocation at this address, which it gives to no other allocation of the process. Throws
// Error(invalid_argument) if the address is not GPU memory.
uint64_t gpu_buffer_of(const void* address);

// Registers GPU memory. Returns null with errno if the system or the NIC refuses; throws Error(system) if the driver
// refuses. The range must be part of one allocation.
ibv_mr* register_gpu_memory(const Device& nic, const void* address, size_t bytes);

}  // namespace ark::rdma
