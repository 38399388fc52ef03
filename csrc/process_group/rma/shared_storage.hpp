// A CPU tensor's storage in memory that other processes can map.
#pragma once

#include <ATen/ATen.h>

#include <memory>

#include "process_group/tensors.hpp"
#include "shm/shared_memory.hpp"

namespace ark {

// Moves the storage there unless it is there already: its tensors keep their contents and see the new memory, which
// lives as long as the storage or anybody else who holds it. Refuses memory that is not PyTorch's own (numpy's, a
// file's, of share_memory_()): somebody else knows its address.
std::shared_ptr<SharedMemory> share_storage(const CallSite& site, const at::Tensor& tensor);

}  // namespace ark
