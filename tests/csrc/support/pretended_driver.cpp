// A CUDA driver without a GPU, for C++ tests of what shares memory (pretended_memory.cpp): linked by them as
// libcuda.so.1, so that nothing opens the system's. Nothing is launched: calls that it does not know fail.
#include <cstring>

#include "jit/driver.hpp"

using namespace ark;

extern "C" {
#define ARK_PRETENDED __attribute__((visibility("default"))) CUresult

ARK_PRETENDED cuInit(unsigned) {
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuGetErrorName(CUresult, const char** text) {
  *text = "CUDA_ERROR";
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuGetErrorString(CUresult, const char** text) {
  *text = "pretended";
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuDeviceGetCount(int* count) {
  *count = 8;
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  std::memset(uuid, device + 1, sizeof *uuid);
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuDeviceCanAccessPeer(int* can, CUdevice, CUdevice) {
  *can = 1;
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(static_cast<intptr_t>(0x1000 + device));
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuCtxGetCurrent(CUcontext* context) {
  *context = nullptr;
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuCtxSetCurrent(CUcontext) {
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) {
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuStreamCreateWithPriority(CUstream* stream, unsigned, int) {
  *stream = nullptr;
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuStreamSynchronize(CUstream) {
  return CUDA_SUCCESS;
}
ARK_PRETENDED cuStreamDestroy_v2(CUstream) {
  return CUDA_SUCCESS;
}
}
