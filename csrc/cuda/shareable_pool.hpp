// Memory for users' tensors that other processes can map; torch.cuda.MemPool allocates from it.
//
// PyTorch's caching allocator requests whole segments through the two C functions below
// (torch.cuda.memory.CUDAPluggableAllocator). Nothing is shared by that. A table of all segments in the process lets
// registration (collectives/cuda/registration.hpp) find a tensor's segment. Registration holds the segment: if PyTorch
// frees it, it stays mapped at its address until its last window ends, so no other memory can be where peers write. It
// just can no longer be found and registered again.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>

#include "cuda/device_memory.hpp"

namespace ark {

struct ShareableSegment {
  uint64_t number;  // unique in this process, never reused
  int device;
  DeviceMemory memory;
};

// The segment that contains all of these bytes, or null.
std::shared_ptr<const ShareableSegment> find_shareable(const void* data, uint64_t bytes);
// The number of segments that PyTorch has not freed.
size_t count_shareable();

}  // namespace ark

extern "C" {
// Returns null if the device has too little memory; PyTorch then frees its cache, retries, and raises OutOfMemoryError.
// Throws for any other failure.
__attribute__((visibility("default"))) void* ark_pool_alloc(ssize_t bytes, int device, void* stream);
// PyTorch ensures that the device no longer uses the memory.
__attribute__((visibility("default"))) void ark_pool_free(void* data, ssize_t bytes, int device, void* stream);
}
