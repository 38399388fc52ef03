// Memory for users' tensors that other processes can map: what torch.cuda.MemPool allocates from.
//
// PyTorch's caching allocator asks for whole segments through the two C functions below (the signature of
// torch.cuda.memory.CUDAPluggableAllocator) and cuts tensors out of them. Nothing is shared by that: neither function
// knows a group. A table of the process knows every segment, so that registration (collectives/cuda/registration.hpp)
// finds the one that a tensor lies in.
//
// Life. Who registers a segment holds it. Freed by PyTorch meanwhile (when its MemPool goes), it stays mapped at its
// address until the last window onto it ends, so no other memory can come to lie where a window is thought to be, and
// what peers write goes nowhere else. It only is no longer found: it cannot be registered again.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>

#include "cuda/device_memory.hpp"

namespace ark {

struct ShareableSegment {
  uint64_t number;  // in this process; never used twice
  int device;
  DeviceMemory memory;
};

// The segment that holds all of these bytes; null: none.
std::shared_ptr<const ShareableSegment> find_shareable(const void* data, uint64_t bytes);
// How many there are that PyTorch has not freed.
size_t count_shareable();

}  // namespace ark

extern "C" {
// Null where the device has not enough memory: PyTorch then frees what it has cached, tries again, and raises its
// OutOfMemoryError. Any other failure is thrown.
__attribute__((visibility("default"))) void* ark_pool_alloc(ssize_t bytes, int device, void* stream);
// Nothing on the device may use it any more, as PyTorch sees to.
__attribute__((visibility("default"))) void ark_pool_free(void* data, ssize_t bytes, int device, void* stream);
}
