// The CUDA driver, opened at run time (libcuda.so.1), so that the build needs and links nothing of CUDA.
//
// driver() returns a table of function pointers that is loaded and checked once: driver().mem_create(...).
// ARK_CUDA_FUNCTIONS lists member, symbol and parameters. The symbol is what cuda.h maps the name to, with its version
// suffix (cuMemAlloc is cuMemAlloc_v2) and without per-thread default streams. All exist since CUDA 12.4, the oldest
// supported driver. Calls return CUresult; check() turns it into an Error with the driver's text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/cuda_types.hpp"
#include "util/dynamic_library.hpp"

// clang-format off
#define ARK_CUDA_FUNCTIONS(X)                                                                                          \
  /* devices and contexts */                                                                                           \
  X(init, cuInit, (unsigned flags))                                                                                    \
  X(driver_get_version, cuDriverGetVersion, (int* version))                                                            \
  X(get_error_name, cuGetErrorName, (CUresult error, const char** text))                                               \
  X(get_error_string, cuGetErrorString, (CUresult error, const char** text))                                           \
  X(device_get_count, cuDeviceGetCount, (int* count))                                                                  \
  X(device_get, cuDeviceGet, (CUdevice* device, int ordinal))                                                          \
  X(device_get_attribute, cuDeviceGetAttribute, (int* value, CUdevice_attribute attribute, CUdevice device))           \
  X(device_get_name, cuDeviceGetName, (char* name, int bytes, CUdevice device))                                        \
  X(device_get_uuid, cuDeviceGetUuid_v2, (CUuuid* uuid, CUdevice device))                                              \
  X(device_can_access_peer, cuDeviceCanAccessPeer, (int* can, CUdevice device, CUdevice peer))                         \
  X(device_primary_ctx_retain, cuDevicePrimaryCtxRetain, (CUcontext* context, CUdevice device))                        \
  X(device_primary_ctx_release, cuDevicePrimaryCtxRelease_v2, (CUdevice device))                                       \
  X(ctx_get_current, cuCtxGetCurrent, (CUcontext* context))                                                            \
  X(ctx_set_current, cuCtxSetCurrent, (CUcontext context))                                                             \
  X(ctx_synchronize, cuCtxSynchronize, (void))                                                                         \
  X(ctx_get_stream_priority_range, cuCtxGetStreamPriorityRange, (int* least, int* greatest))                           \
  /* modules, functions, launches */                                                                                   \
  X(module_load_data, cuModuleLoadData, (CUmodule* module, const void* image))                                         \
  X(module_unload, cuModuleUnload, (CUmodule module))                                                                  \
  X(module_get_function, cuModuleGetFunction, (CUfunction* function, CUmodule module, const char* name))               \
  X(func_load, cuFuncLoad, (CUfunction function))                                                                      \
  X(func_get_attribute, cuFuncGetAttribute, (int* value, CUfunction_attribute attribute, CUfunction function))         \
  X(func_set_attribute, cuFuncSetAttribute, (CUfunction function, CUfunction_attribute attribute, int value))          \
  X(func_get_param_info, cuFuncGetParamInfo, (CUfunction function, size_t index, size_t* offset, size_t* bytes))       \
  X(launch_kernel_ex, cuLaunchKernelEx,                                                                                \
    (const CUlaunchConfig* config, CUfunction function, void** params, void** extra))                                  \
  X(launch_host_func, cuLaunchHostFunc, (CUstream stream, CUhostFn function, void* user_data))                         \
  X(occupancy_max_active_blocks, cuOccupancyMaxActiveBlocksPerMultiprocessor,                                          \
    (int* blocks, CUfunction function, int block_threads, size_t dynamic_shared_bytes))                                \
  /* memory */                                                                                                         \
  X(mem_get_info, cuMemGetInfo_v2, (size_t* free_bytes, size_t* total_bytes))                                          \
  X(mem_alloc, cuMemAlloc_v2, (CUdeviceptr* pointer, size_t bytes))                                                    \
  X(mem_free, cuMemFree_v2, (CUdeviceptr pointer))                                                                     \
  X(mem_get_address_range, cuMemGetAddressRange_v2, (CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer))           \
  X(mem_address_reserve, cuMemAddressReserve,                                                                          \
    (CUdeviceptr* pointer, size_t bytes, size_t alignment, CUdeviceptr wish, unsigned long long flags))                \
  X(mem_address_free, cuMemAddressFree, (CUdeviceptr pointer, size_t bytes))                                           \
  X(mem_create, cuMemCreate,                                                                                           \
    (CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* prop, unsigned long long flags))   \
  X(mem_release, cuMemRelease, (CUmemGenericAllocationHandle handle))                                                  \
  X(mem_map, cuMemMap,                                                                                                 \
    (CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)) \
  X(mem_unmap, cuMemUnmap, (CUdeviceptr pointer, size_t bytes))                                                        \
  X(mem_set_access, cuMemSetAccess,                                                                                    \
    (CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc* descriptions, size_t count))                            \
  X(mem_export_to_shareable_handle, cuMemExportToShareableHandle,                                                      \
    (void* shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags))  \
  X(mem_import_from_shareable_handle, cuMemImportFromShareableHandle,                                                  \
    (CUmemGenericAllocationHandle* handle, void* shareable, CUmemAllocationHandleType type))                           \
  X(mem_get_allocation_granularity, cuMemGetAllocationGranularity,                                                     \
    (size_t* bytes, const CUmemAllocationProp* prop, CUmemAllocationGranularity_flags which))                          \
  X(mem_get_handle_for_address_range, cuMemGetHandleForAddressRange,                                                   \
    (void* handle, CUdeviceptr pointer, size_t bytes, CUmemRangeHandleType type, unsigned long long flags))            \
  X(mem_retain_allocation_handle, cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle* handle, void* address))  \
  X(memcpy_async, cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))                    \
  X(memset_d8_async, cuMemsetD8Async, (CUdeviceptr to, unsigned char value, size_t count, CUstream stream))            \
  X(memset_d32_async, cuMemsetD32Async, (CUdeviceptr to, unsigned value, size_t count, CUstream stream))               \
  X(mem_host_alloc, cuMemHostAlloc, (void** pointer, size_t bytes, unsigned flags))                                    \
  X(mem_free_host, cuMemFreeHost, (void* pointer))                                                                     \
  X(mem_host_get_device_pointer, cuMemHostGetDevicePointer_v2, (CUdeviceptr* device, void* host, unsigned flags))      \
  X(mem_host_register, cuMemHostRegister_v2, (void* pointer, size_t bytes, unsigned flags))                            \
  X(mem_host_unregister, cuMemHostUnregister, (void* pointer))                                                         \
  X(pointer_get_attribute, cuPointerGetAttribute, (void* value, CUpointer_attribute attribute, CUdeviceptr pointer))   \
  X(tensor_map_encode_tiled, cuTensorMapEncodeTiled,                                                                   \
    (CUtensorMap* map, CUtensorMapDataType type, uint32_t rank, void* address, const uint64_t* sizes,                  \
     const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides, CUtensorMapInterleave interleave,  \
     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill))                      \
  /* streams and events */                                                                                             \
  X(stream_create_with_priority, cuStreamCreateWithPriority, (CUstream* stream, unsigned flags, int priority))         \
  X(stream_destroy, cuStreamDestroy_v2, (CUstream stream))                                                             \
  X(stream_synchronize, cuStreamSynchronize, (CUstream stream))                                                        \
  X(stream_query, cuStreamQuery, (CUstream stream))                                                                    \
  X(stream_wait_event, cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags))                            \
  X(stream_wait_value32, cuStreamWaitValue32_v2,                                                                       \
    (CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags))                                            \
  X(stream_wait_value64, cuStreamWaitValue64_v2,                                                                       \
    (CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags))                                            \
  X(stream_write_value32, cuStreamWriteValue32_v2,                                                                     \
    (CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags))                                            \
  X(stream_write_value64, cuStreamWriteValue64_v2,                                                                     \
    (CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags))                                            \
  X(stream_batch_mem_op, cuStreamBatchMemOp_v2,                                                                        \
    (CUstream stream, unsigned count, CUstreamBatchMemOpParams* operations, unsigned flags))                           \
  X(stream_is_capturing, cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus* status))                        \
  X(stream_get_capture_info, cuStreamGetCaptureInfo_v3,                                                                \
    (CUstream stream, CUstreamCaptureStatus* status, uint64_t* id, CUgraph* graph, const void** nodes,                 \
     const void** edges, size_t* count))                                                                               \
  X(thread_exchange_stream_capture_mode, cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode* mode))               \
  X(user_object_create, cuUserObjectCreate,                                                                            \
    (CUuserObject* object, void* pointer, CUhostFn destroy, unsigned references, unsigned flags))                      \
  X(user_object_release, cuUserObjectRelease, (CUuserObject object, unsigned count))                                   \
  X(graph_retain_user_object, cuGraphRetainUserObject,                                                                 \
    (CUgraph graph, CUuserObject object, unsigned count, unsigned flags))                                              \
  X(event_create, cuEventCreate, (CUevent* event, unsigned flags))                                                     \
  X(event_record, cuEventRecord, (CUevent event, CUstream stream))                                                     \
  X(event_query, cuEventQuery, (CUevent event))                                                                        \
  X(event_synchronize, cuEventSynchronize, (CUevent event))                                                            \
  X(event_elapsed_time, cuEventElapsedTime, (float* milliseconds, CUevent start, CUevent end))                         \
  X(event_destroy, cuEventDestroy_v2, (CUevent event))
// clang-format on

namespace ark {

struct Driver {
#define ARK_CUDA_MEMBER(member, symbol, parameters) CUresult(*member) parameters = nullptr;
  ARK_CUDA_FUNCTIONS(ARK_CUDA_MEMBER)
#undef ARK_CUDA_MEMBER
  int version = 0;  // the CUDA version that it supports: 13000 is CUDA 13.0
};

constexpr int kOldestDriver = 12040;

// Returns the driver, initialised (cuInit). Throws Error(system) with a remedy if there is none, it is too old, or it
// sees no GPU. Failures are not cached: the next call tries again.
const Driver& driver();
// Replaces what driver() returns, for tests without a GPU. The table must outlive its use.
void use_driver(const Driver& table);
// The text of the error that driver() would throw; empty if it would not.
std::string driver_problem();
// Returns true if driver() would not throw.
bool has_driver() noexcept;

// Opens the library, resolves symbols, checks the version and initialises. driver() does this once with the system's
// loader.
Driver load_driver(const jit::LibraryOpener& opener);

// Throws Error(system), such as "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (out of memory)". `what`: the attempted
// call.
void check(CUresult result, const std::string& what);
// For example "CUDA_ERROR_OUT_OF_MEMORY (out of memory)". Never throws for an unknown code.
std::string describe(CUresult result);

// Returns true for faults that the context does not survive (such as an illegal address): all later calls fail too.
bool is_sticky(CUresult result);

// --- devices -----------------------------------------------------------------------------------------------------

int device_attribute(int device, CUdevice_attribute attribute);
std::string device_name(int device);

// PyTorch's context on this device, retained once for the life of the process.
CUcontext primary_context(int device);

// Makes a context current on this thread and restores the previous one. If it is already current, as inside PyTorch's
// device guards, that takes one driver call instead of three.
class CurrentContext {
 public:
  explicit CurrentContext(CUcontext context);
  explicit CurrentContext(int device) : CurrentContext(primary_context(device)) {}
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  CUcontext former_ = nullptr;
  bool changed_ = false;
};

// Lets this thread allocate, load and query while any thread captures a graph. None of it is captured.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  CUstreamCaptureMode former_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace ark
