// GPU memory without a GPU. The pretended driver's allocations are memfds with real mappings, so that other processes
// read what one writes, descriptors are real, and leaks are counted. A device has 1 GB. Copies between such memory and
// pinned host memory work, and peer access can be made to fail (pretend_lie). tests/support/pretended has all other
// driver calls, for C++ and Python.
#include "support/pretended_driver.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "cuda/driver.hpp"

namespace ark::test {

namespace {
std::mutex mutex;
std::map<CUdeviceptr, size_t> reserved;
std::map<void*, size_t> registered;
std::atomic<int> handles{0}, mappings{0};
std::atomic<int> maps_that_fail{0}, host_memory{1}, for_nics{0};
std::atomic<bool> takes_nics{true};

// A mapped or pinned range. `peers` numbers the mappings of peers' memory from 1 on, in mapping order.
struct Range {
  size_t bytes;
  int peers;
  uint64_t buffer = 0;  // the allocation's id
};
uint64_t buffers = 0;
std::map<CUdeviceptr, Range> ranges;
std::map<CUmemGenericAllocationHandle, bool> imported;
int peers_mapped = 0;
struct Lie {
  int how = 0, ways = 0, only = 0;
} lie;
std::atomic<bool> endless{false};

// Returns null for memory that must not be accessed.
const Range* range_of(CUdeviceptr at, size_t bytes) {
  auto found = ranges.upper_bound(at);
  if (found == ranges.begin()) return nullptr;
  --found;
  return at + bytes <= found->first + found->second.bytes ? &found->second : nullptr;
}
}  // namespace

void pinned(void* host, size_t bytes) {
  const std::lock_guard lock(mutex);
  if (bytes == 0) {
    ranges.erase(reinterpret_cast<CUdeviceptr>(host));
  } else {
    ranges[reinterpret_cast<CUdeviceptr>(host)] = {bytes, 0, ++buffers};
  }
}

void write_from_device(CUdeviceptr to, const void* from, size_t bytes, int way) {
  const std::lock_guard lock(mutex);
  const Range* const target = range_of(to, bytes);
  if (target == nullptr) return;
  const bool lies = target->peers != 0 && (lie.ways & way) != 0 && (lie.only == 0 || lie.only == target->peers);
  if (lies && lie.how == kEndless) endless = true;
  if (lies && lie.how != kWrong) return;
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  if (lies) *reinterpret_cast<unsigned char*>(to + bytes / 2) ^= 0x40;
}

bool is_endless() {
  return endless;
}

Pretended pretended() {
  const std::lock_guard lock(mutex);
  return {handles, mappings, static_cast<int>(reserved.size()), static_cast<int>(registered.size())};
}

int allocated_for_nics() {
  return for_nics;
}

void refuse_nics(bool refused) {
  takes_nics = !refused;
}

void fail_mappings(int count) {
  maps_that_fail = count;
}

}  // namespace ark::test

using namespace ark;
using namespace ark::test;

extern "C" {
__attribute__((visibility("default"))) void pretend_lie(int how, int ways, int only) {
  const std::lock_guard lock(mutex);
  lie = {how, ways, only};
  if (how == 0) endless = false;
}
// Host memory that counts as a device's from here on.
__attribute__((visibility("default"))) void pretend_memory(void* host, unsigned long bytes) {
  pinned(host, bytes);
}
#define ARK_PRETENDED __attribute__((visibility("default"))) CUresult

ARK_PRETENDED cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                            CUmemAllocationGranularity_flags) {
  *bytes = 2 << 20;
  return CUDA_SUCCESS;
}
extern "C" __attribute__((visibility("default"))) void pretend_host_memory(int value) {
  host_memory = value;
}
ARK_PRETENDED cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* prop,
                          unsigned long long) {
  if (prop->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA && host_memory == 0) return CUDA_ERROR_NOT_SUPPORTED;
  if (prop->allocFlags.gpuDirectRDMACapable != 0 && !takes_nics) return CUDA_ERROR_NOT_SUPPORTED;
  if (bytes > (size_t{1} << 30)) return CUDA_ERROR_OUT_OF_MEMORY;
  const int fd = ::memfd_create("pretended", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return CUDA_ERROR_UNKNOWN;
  *handle = static_cast<CUmemGenericAllocationHandle>(fd) + 1;
  ++handles;
  for_nics += prop->allocFlags.gpuDirectRDMACapable != 0;
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuMemRelease(CUmemGenericAllocationHandle handle) {
  --handles;
  {
    const std::lock_guard lock(mutex);
    imported.erase(handle);
  }
  return ::close(static_cast<int>(handle - 1)) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
ARK_PRETENDED cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                           CUmemAllocationHandleType, unsigned long long) {
  const int fd = ::dup(static_cast<int>(handle - 1));
  *static_cast<int*>(shareable) = fd;
  return fd >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
ARK_PRETENDED cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shareable,
                                             CUmemAllocationHandleType) {
  const int fd = ::dup(static_cast<int>(reinterpret_cast<intptr_t>(shareable)));
  if (fd < 0) return CUDA_ERROR_INVALID_HANDLE;
  *handle = static_cast<CUmemGenericAllocationHandle>(fd) + 1;
  ++handles;
  const std::lock_guard lock(mutex);
  imported[*handle] = true;
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuMemAddressReserve(CUdeviceptr* pointer, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* const range = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *pointer = reinterpret_cast<CUdeviceptr>(range);
  const std::lock_guard lock(mutex);
  reserved[*pointer] = bytes;
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
  const std::lock_guard lock(mutex);
  if (reserved.erase(pointer) == 0) return CUDA_ERROR_INVALID_VALUE;
  ::munmap(reinterpret_cast<void*>(pointer), bytes);
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuMemMap(CUdeviceptr pointer, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                       unsigned long long) {
  if (maps_that_fail > 0 && maps_that_fail-- > 0) return CUDA_ERROR_UNKNOWN;
  const off_t there = ::lseek(static_cast<int>(handle - 1), 0, SEEK_END);
  if (there < static_cast<off_t>(bytes)) return CUDA_ERROR_INVALID_VALUE;
  void* const at = ::mmap(reinterpret_cast<void*>(pointer), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                          static_cast<int>(handle - 1), 0);
  if (at == MAP_FAILED) return CUDA_ERROR_UNKNOWN;
  ++mappings;
  const std::lock_guard lock(mutex);
  ranges[pointer] = {bytes, imported.count(handle) != 0 ? ++peers_mapped : 0, ++buffers};
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
  --mappings;
  {
    const std::lock_guard lock(mutex);
    ranges.erase(pointer);
  }
  ::mmap(reinterpret_cast<void*>(pointer), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE,
         -1, 0);
  return CUDA_SUCCESS;
}
// Memory that nobody may touch has an id, too.
ARK_PRETENDED cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (attribute != CU_POINTER_ATTRIBUTE_BUFFER_ID) return CUDA_SUCCESS;
  const std::lock_guard lock(mutex);
  const Range* const range = range_of(pointer, 1);
  const bool untouchable = pointer >> 40 == 1;  // as cuMemAlloc gives it
  if (range == nullptr && !untouchable) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<uint64_t*>(value) = range ? range->buffer : ~uint64_t{0};
  return *static_cast<uint64_t*>(value) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
// A dma-buf of this process alone: a file that says where the memory is.
ARK_PRETENDED cuMemGetHandleForAddressRange(void* handle, CUdeviceptr pointer, size_t bytes, CUmemRangeHandleType,
                                            unsigned long long) {
  if (pointer % 4096 != 0 || bytes % 4096 != 0) return CUDA_ERROR_INVALID_VALUE;
  const int fd = ::memfd_create("pretended-dma-buf", MFD_CLOEXEC);
  const uint64_t words[3] = {0x6675'626d'6164, pointer, bytes};
  if (fd < 0 || ::pwrite(fd, words, sizeof words, 0) != sizeof words) return CUDA_ERROR_UNKNOWN;
  *static_cast<int*>(handle) = fd;
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned) {
  if (maps_that_fail > 0 && maps_that_fail-- > 0) return CUDA_ERROR_UNKNOWN;
  const std::lock_guard lock(mutex);
  return registered.emplace(pointer, bytes).second ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
ARK_PRETENDED cuMemHostUnregister(void* pointer) {
  const std::lock_guard lock(mutex);
  return registered.erase(pointer) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
ARK_PRETENDED cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream) {
  {
    const std::lock_guard lock(mutex);
    if (range_of(from, bytes) == nullptr) return CUDA_SUCCESS;
  }
  write_from_device(to, reinterpret_cast<const void*>(from), bytes, kCopies);
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream) {
  std::memset(reinterpret_cast<void*>(to), value, count);
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream) {
  std::fill_n(reinterpret_cast<unsigned*>(to), count, value);
  return CUDA_SUCCESS;
}
}
