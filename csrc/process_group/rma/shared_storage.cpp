#include "process_group/rma/shared_storage.hpp"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>

namespace ark {

namespace {

using Holder = std::shared_ptr<SharedMemory>;

void release(void* context) {
  delete static_cast<Holder*>(context);
}

}  // namespace

std::shared_ptr<SharedMemory> share_storage(const CallSite& site, const at::Tensor& tensor) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  const size_t bytes = storage.nbytes();
  const at::DataPtr& before = storage.data_ptr();
  if (before.get_deleter() == &release) return *static_cast<Holder*>(before.get_context());
  if (bytes == 0) return std::make_shared<SharedMemory>(SharedMemory::create("ark-window", 1));
  if (before.get_deleter() != c10::GetCPUAllocator()->raw_deleter())
    refuse(
        site, ErrorKind::invalid_argument,
        "tensor's memory is not of PyTorch's own allocator (of numpy, a file, or share_memory_()), so it cannot move "
        "to where the other ranks of this machine can map it",
        "Register a copy: tensor.clone().");
  auto memory = std::make_shared<SharedMemory>(SharedMemory::create("ark-window", bytes));
  memory->commit(0, bytes);
  std::memcpy(memory->data(), before.get(), bytes);
  std::byte* const data = memory->data();
  storage.set_data_ptr_noswap(at::DataPtr(data, new Holder(memory), &release, c10::Device(c10::kCPU)));
  return memory;
}

}  // namespace ark
