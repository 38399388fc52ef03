// The common base of host and device code: integer types, function and loop markers, bit casts.
//
// Compiles under g++ and clang, under nvcc, and under NVRTC without headers other than this library's own: PyTorch's
// wheels contain NVRTC but no CUDA headers. ARK_DEVICE_CODE is 1 where GPU code is generated (NVRTC, nvcc's device
// pass) and inline PTX is allowed; elsewhere the portable form of the same function is compiled and tested.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cstdint>
#endif

#if defined(__CUDACC__)
#define ARK_HOST_DEVICE __host__ __device__
#define ARK_DEVICE_INLINE __host__ __device__ __forceinline__
#define ARK_UNROLL _Pragma("unroll")
#define ARK_ROLLED _Pragma("unroll 1")
#else
#define ARK_HOST_DEVICE
#define ARK_DEVICE_INLINE inline __attribute__((always_inline))
#define ARK_UNROLL _Pragma("GCC unroll 16")
#define ARK_ROLLED
#endif

#if defined(__CUDA_ARCH__)
#define ARK_DEVICE_CODE 1
#else
#define ARK_DEVICE_CODE 0
#endif

namespace ark {

#if defined(__CUDACC__)
using uint64 = unsigned long long;
using uint32 = unsigned int;
using uint16 = unsigned short;
using uint8 = unsigned char;
#else
using uint64 = uint64_t;
using uint32 = uint32_t;
using uint16 = uint16_t;
using uint8 = uint8_t;
#endif

template <class To, class From>
ARK_DEVICE_INLINE constexpr To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

}  // namespace ark
