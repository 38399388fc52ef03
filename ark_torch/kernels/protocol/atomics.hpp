// Atomics for protocol code that is written once and compiled for host and device.
//
// Counters in shared (symmetric) memory are plain 64- and 32-bit words; these functions are the only way to touch
// them. On the host they are std::atomic_ref, which ThreadSanitizer sees; under NVRTC/nvcc they are
// cuda::atomic_ref at system scope, because the other side may be a peer GPU or a CPU. No stand-alone fences: the
// order comes from the acquire and release operations alone.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include <cuda/atomic>
#define ARK_HOST_DEVICE __host__ __device__
#else
#include <atomic>
#include <cstdint>
#define ARK_HOST_DEVICE
#endif

namespace ark::protocol {

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
using uint64 = unsigned long long;
using uint32 = unsigned int;
template <class T>
using Ref = cuda::atomic_ref<T, cuda::thread_scope_system>;
namespace order = cuda::std;
#else
using uint64 = uint64_t;
using uint32 = uint32_t;
template <class T>
using Ref = std::atomic_ref<T>;
namespace order = std;
#endif

template <class T>
ARK_HOST_DEVICE inline T load_acquire(const T& word) {
  return Ref<T>(const_cast<T&>(word)).load(order::memory_order_acquire);
}

template <class T>
ARK_HOST_DEVICE inline T load_relaxed(const T& word) {
  return Ref<T>(const_cast<T&>(word)).load(order::memory_order_relaxed);
}

template <class T>
ARK_HOST_DEVICE inline void store_release(T& word, T value) {
  Ref<T>(word).store(value, order::memory_order_release);
}

template <class T>
ARK_HOST_DEVICE inline void store_relaxed(T& word, T value) {
  Ref<T>(word).store(value, order::memory_order_relaxed);
}

// Sequentially consistent forms: only for the sleep/wake handshake of counter.hpp (a store that must not be
// reordered after the load of another word).
template <class T>
ARK_HOST_DEVICE inline T load_ordered(const T& word) {
  return Ref<T>(const_cast<T&>(word)).load(order::memory_order_seq_cst);
}

template <class T>
ARK_HOST_DEVICE inline void store_ordered(T& word, T value) {
  Ref<T>(word).store(value, order::memory_order_seq_cst);
}

template <class T>
ARK_HOST_DEVICE inline T add_ordered(T& word, T amount) {
  return Ref<T>(word).fetch_add(amount, order::memory_order_seq_cst);
}

template <class T>
ARK_HOST_DEVICE inline bool compare_exchange(T& word, T& expected, T desired) {
  return Ref<T>(word).compare_exchange_strong(expected, desired, order::memory_order_acq_rel,
                                              order::memory_order_acquire);
}

}  // namespace ark::protocol
