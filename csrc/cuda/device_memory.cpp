// Driver calls for device_memory.hpp.
#include "cuda/device_memory.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "util/error.hpp"

namespace ark {

namespace {

CUmemAllocationProp shareable_on(int device, bool on_host) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  if (on_host) {
    int node = 0;
    const CUresult known = driver().device_get_attribute(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device);
    prop.location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, known == CUDA_SUCCESS ? std::max(node, 0) : 0};  // -1: no NUMA
  }
  return prop;
}

// Whether a NIC may read and write such memory of the device. Drivers that do not know the attribute offer none.
bool offers_rdma(int device) {
  int offered = 0;
  const CUresult known =
      driver().device_get_attribute(&offered, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device);
  return known == CUDA_SUCCESS && offered != 0;
}

std::string place_of(int device, bool on_host) {
  return (on_host ? "on the host, beside device " : "on device ") + std::to_string(device);
}

}  // namespace

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept {
  *this = std::move(other);
}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(pointer_, other.pointer_);
  std::swap(bytes_, other.bytes_);
  std::swap(handle_, other.handle_);
  return *this;
}

DeviceMemory::~DeviceMemory() {
  if (device_ < 0) return;
  // Ignores errors: at exit the driver may be gone, and the memory with it.
  try {
    const RelaxedCapture relaxed;
    if (pointer_ != 0) {
      driver().mem_unmap(pointer_, bytes_);
      driver().mem_address_free(pointer_, bytes_);
    }
    if (handle_ != 0) driver().mem_release(handle_);
  } catch (const Error&) {
  }
}

std::optional<DeviceMemory> DeviceMemory::try_allocate(int device, size_t bytes) {
  return made(device, bytes, false);
}

std::optional<DeviceMemory> DeviceMemory::made(int device, size_t bytes, bool on_host) {
  const RelaxedCapture relaxed;
  const CurrentContext context(device);
  CUmemAllocationProp prop = shareable_on(device, on_host);
  prop.allocFlags.gpuDirectRDMACapable = !on_host && offers_rdma(device);
  size_t granularity = 0;
  check(driver().mem_get_allocation_granularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity " + place_of(device, on_host));
  DeviceMemory memory;
  memory.device_ = device;
  const size_t whole = (bytes + granularity - 1) / granularity * granularity;
  CUresult result = driver().mem_create(&memory.handle_, whole, &prop, 0);
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY && prop.allocFlags.gpuDirectRDMACapable != 0) {
    prop.allocFlags.gpuDirectRDMACapable = 0;  // offered, but not on this system (peer-memory modules, virtual GPUs)
    result = driver().mem_create(&memory.handle_, whole, &prop, 0);
  }
  if (result != CUDA_SUCCESS) memory.handle_ = 0;
  if (result == CUDA_ERROR_OUT_OF_MEMORY) return std::nullopt;
  check(result, "cuMemCreate of " + std::to_string(whole >> 20) + " MB " + place_of(device, on_host));
  memory.map(whole);
  return memory;
}

DeviceMemory DeviceMemory::allocate(int device, size_t bytes, const char* remedy) {
  std::optional<DeviceMemory> memory = try_allocate(device, bytes);
  if (!memory) {
    ErrorContext hint;
    hint.remedy = remedy;
    throw Error(ErrorKind::system,
                "cuMemCreate of " + std::to_string(bytes >> 20) + " MB on device " + std::to_string(device) +
                    " failed: " + describe(CUDA_ERROR_OUT_OF_MEMORY),
                hint);
  }
  memory->zero();
  return std::move(*memory);
}

DeviceMemory DeviceMemory::allocate_on_host(int device, size_t bytes) {
  std::optional<DeviceMemory> memory = made(device, bytes, true);
  if (!memory) {
    ErrorContext hint;
    hint.remedy = "Free memory of the host, or raise what the process may lock (ulimit -l).";
    throw Error(ErrorKind::system, "no " + std::to_string(bytes >> 20) + " MB of pinned memory on the host", hint);
  }
  memory->zero();
  return std::move(*memory);
}

void DeviceMemory::zero() {
  const RelaxedCapture relaxed;
  const CurrentContext context(device_);
  CUstream stream = nullptr;
  check(driver().stream_create_with_priority(&stream, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority");
  CUresult zeroed = driver().memset_d8_async(pointer_, 0, bytes_, stream);
  if (zeroed == CUDA_SUCCESS) zeroed = driver().stream_synchronize(stream);
  driver().stream_destroy(stream);
  check(zeroed, "zeroing " + std::to_string(bytes_ >> 20) + " MB for device " + std::to_string(device_));
}

DeviceMemory DeviceMemory::import(int device, const UniqueFd& fd, size_t bytes) {
  const RelaxedCapture relaxed;
  const CurrentContext context(device);
  DeviceMemory memory;
  memory.device_ = device;
  check(driver().mem_import_from_shareable_handle(&memory.handle_,
                                                  reinterpret_cast<void*>(static_cast<intptr_t>(fd.get())),
                                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "cuMemImportFromShareableHandle");
  memory.map(bytes);
  return memory;
}

void DeviceMemory::map(size_t bytes) {
  check(driver().mem_address_reserve(&pointer_, bytes, 0, 0, 0), "cuMemAddressReserve");
  bytes_ = bytes;
  if (const CUresult result = driver().mem_map(pointer_, bytes, 0, handle_, 0); result != CUDA_SUCCESS) {
    driver().mem_address_free(pointer_, bytes);
    pointer_ = 0;
    check(result, "cuMemMap of " + std::to_string(bytes >> 20) + " MB");
  }
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device_}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  check(driver().mem_set_access(pointer_, bytes, &access, 1), "cuMemSetAccess for device " + std::to_string(device_));
}

UniqueFd DeviceMemory::export_fd() const {
  int fd = -1;
  check(driver().mem_export_to_shareable_handle(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "cuMemExportToShareableHandle");
  return UniqueFd(fd);
}

void DeviceMemory::open_to_peers() const {
  const RelaxedCapture relaxed;
  int count = 0;
  check(driver().device_get_count(&count), "cuDeviceGetCount");
  for (int other = 0; other < count; ++other) {
    int reaches = 0;
    if (other == device_ || driver().device_can_access_peer(&reaches, other, device_) != CUDA_SUCCESS || reaches == 0)
      continue;
    const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, other}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    driver().mem_set_access(pointer_, bytes_, &access, 1);  // if this fails, a later copy reports it
  }
}

PinnedMemory::PinnedMemory(int device, size_t bytes) : ordinal_(device) {
  const RelaxedCapture relaxed;
  const CurrentContext context(device);
  check(driver().mem_host_alloc(&host_, bytes, kHostAllocPortable | kHostAllocDeviceMap),
        "cuMemHostAlloc of " + std::to_string(bytes) + " bytes");
  std::memset(host_, 0, bytes);
  check(driver().mem_host_get_device_pointer(&device_, host_, 0), "cuMemHostGetDevicePointer");
}

PinnedMemory::~PinnedMemory() {
  try {
    const RelaxedCapture relaxed;
    const CurrentContext context(ordinal_);
    driver().mem_free_host(host_);
  } catch (const Error&) {
  }
}

}  // namespace ark
