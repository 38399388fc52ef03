#include "dma/rdma/gpu_memory.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "cuda/driver.hpp"
#include "util/unique_fd.hpp"

namespace ark::rdma {

namespace {

constexpr size_t kTrialBytes = 2 << 20;
constexpr int kOrderedForOwner = 100;  // CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER

CUdeviceptr pointer_of(const void* address) {
  return static_cast<CUdeviceptr>(reinterpret_cast<uintptr_t>(address));
}

}  // namespace

uint64_t gpu_buffer_of(const void* address) {
  uint64_t buffer = 0;
  const CUresult result = driver().pointer_get_attribute(&buffer, CU_POINTER_ATTRIBUTE_BUFFER_ID, pointer_of(address));
  if (result != CUDA_SUCCESS || buffer == 0)
    throw Error(ErrorKind::invalid_argument, "the CUDA driver knows no GPU memory at this address",
                ErrorContext{-1, -1, "", 0, "Pass memory of a CUDA device."});
  return buffer;
}

ibv_mr* register_gpu_memory(const Device& nic, const void* address, size_t bytes) {
  // The driver exports whole pages of the host's size.
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const CUdeviceptr from = pointer_of(address) / page * page;
  const CUdeviceptr to = (pointer_of(address) + bytes + page - 1) / page * page;
  int fd = -1;
  check(driver().mem_get_handle_for_address_range(&fd, from, to - from, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0),
        "cuMemGetHandleForAddressRange of " + std::to_string(bytes) + " bytes for the NIC");
  const UniqueFd owned(fd);  // the region keeps a reference of its own
  return nic.verbs().reg_dmabuf_mr(nic.domain(), pointer_of(address) - from, bytes, pointer_of(address), fd, kAccess);
}

GpuPath gpu_path(const Device& nic, int gpu) {
  const auto staged = [](const std::string& why) { return GpuPath{false, why}; };
  if (!nic.verbs().reg_dmabuf_mr) return staged("libibverbs has no ibv_reg_dmabuf_mr (rdma-core 34 and newer have)");
  try {
    if (device_attribute(gpu, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) == 0)
      return staged("the CUDA driver exports no dma-buf of this device (it takes the open kernel modules)");
    if (device_attribute(gpu, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING) < kOrderedForOwner)
      return staged("kernels of this device may miss what a NIC has written");
    const CurrentContext context(gpu);
    const RelaxedCapture relaxed;
    CUdeviceptr trial = 0;
    check(driver().mem_alloc(&trial, kTrialBytes), "cuMemAlloc of " + std::to_string(kTrialBytes) + " bytes");
    std::string why;
    try {
      ibv_mr* region = register_gpu_memory(nic, reinterpret_cast<const void*>(trial), kTrialBytes);
      if (region) {
        nic.verbs().dereg_mr(region);
      } else {
        why = nic.port().device + " registers no GPU memory: " + std::strerror(errno);
      }
    } catch (const Error& error) {
      why = error.message();
    }
    driver().mem_free(trial);
    return why.empty() ? GpuPath{true, ""} : staged(why);
  } catch (const Error& error) {
    return staged(error.message());
  }
}

}  // namespace ark::rdma
