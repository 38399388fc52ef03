// Atomics for protocol code that is written once and compiled for host and device.
//
// Counters in shared (symmetric) memory are plain 64- and 32-bit words, accessed only through these functions. On the
// host they are compiler builtins, which ThreadSanitizer sees (std::atomic_ref is equivalent, but its header takes half
// as long to compile as a whole region). On the device they are PTX at system scope, because the other side may be a
// peer GPU or a CPU; cuda::atomic_ref is not an option, as PyTorch's wheels lack libcu++.
#pragma once

#include "protocol/base.hpp"

namespace ark::protocol {

// Why the PTX is enough (PTX ISA, chapter "Memory Consistency Model"). Two operations on a word are morally strong if
// both are strong, of the word's size, and of scopes that include each other's thread; .sys includes the host's
// threads. ld.acquire and st.release form an acquire and a release pattern: one synchronizes with the other if it
// observes it. A sequentially consistent operation is one after a fence.sc.sys, the mapping proven by the model's
// authors (Lustig, Sahasrabuddhe and Giroux, "A Formal Analysis of the NVIDIA PTX Memory Consistency Model", ASPLOS
// 2019). All morally strong fence.sc are in one order, which observations after them cannot contradict; Dekker's
// handshake in counter.hpp relies on that. A fence.sc followed by a strong write is itself a release pattern, so after
// it a relaxed store releases, and an acquiring add acquires and releases, without a second barrier. volatile and
// "memory" keep the compiler from moving or merging accesses; no other fence is needed.

using ark::uint32;
using ark::uint64;

// The ordered forms are sequentially consistent: only for the sleep/wake handshake of counter.hpp, where a store must
// not be reordered after the load of another word.
#if ARK_DEVICE_CODE

#define ARK_PTX_ATOMICS(Word, width, reg)                                                                       \
  ARK_HOST_DEVICE inline Word load_acquire(const Word& word) {                                                  \
    Word value;                                                                                                 \
    asm volatile("ld.acquire.sys.u" width " %0, [%1];" : "=" reg(value) : "l"(&word) : "memory");               \
    return value;                                                                                               \
  }                                                                                                             \
  ARK_HOST_DEVICE inline Word load_relaxed(const Word& word) {                                                  \
    Word value;                                                                                                 \
    asm volatile("ld.relaxed.sys.u" width " %0, [%1];" : "=" reg(value) : "l"(&word) : "memory");               \
    return value;                                                                                               \
  }                                                                                                             \
  ARK_HOST_DEVICE inline void store_release(Word& word, Word value) {                                           \
    asm volatile("st.release.sys.u" width " [%0], %1;" ::"l"(&word), reg(value) : "memory");                    \
  }                                                                                                             \
  ARK_HOST_DEVICE inline void store_relaxed(Word& word, Word value) {                                           \
    asm volatile("st.relaxed.sys.u" width " [%0], %1;" ::"l"(&word), reg(value) : "memory");                    \
  }                                                                                                             \
  ARK_HOST_DEVICE inline Word load_ordered(const Word& word) {                                                  \
    Word value;                                                                                                 \
    asm volatile("fence.sc.sys; ld.acquire.sys.u" width " %0, [%1];" : "=" reg(value) : "l"(&word) : "memory"); \
    return value;                                                                                               \
  }                                                                                                             \
  ARK_HOST_DEVICE inline void store_ordered(Word& word, Word value) {                                           \
    asm volatile("fence.sc.sys; st.relaxed.sys.u" width " [%0], %1;" ::"l"(&word), reg(value) : "memory");      \
  }                                                                                                             \
  ARK_HOST_DEVICE inline Word add_ordered(Word& word, Word amount) {                                            \
    Word before;                                                                                                \
    asm volatile("fence.sc.sys; atom.add.acquire.sys.u" width " %0, [%1], %2;"                                  \
                 : "=" reg(before)                                                                              \
                 : "l"(&word), reg(amount)                                                                      \
                 : "memory");                                                                                   \
    return before;                                                                                              \
  }                                                                                                             \
  ARK_HOST_DEVICE inline Word add_relaxed(Word& word, Word amount) {                                            \
    Word before;                                                                                                \
    asm volatile("atom.add.relaxed.sys.u" width " %0, [%1], %2;"                                                \
                 : "=" reg(before)                                                                              \
                 : "l"(&word), reg(amount)                                                                      \
                 : "memory");                                                                                   \
    return before;                                                                                              \
  }                                                                                                             \
  ARK_HOST_DEVICE inline bool compare_exchange(Word& word, Word& expected, Word desired) {                      \
    Word before;                                                                                                \
    asm volatile("atom.cas.acq_rel.sys.b" width " %0, [%1], %2, %3;"                                            \
                 : "=" reg(before)                                                                              \
                 : "l"(&word), reg(expected), reg(desired)                                                      \
                 : "memory");                                                                                   \
    const bool exchanged = before == expected;                                                                  \
    expected = before;                                                                                          \
    return exchanged;                                                                                           \
  }
ARK_PTX_ATOMICS(uint64, "64", "l")
ARK_PTX_ATOMICS(uint32, "32", "r")
#undef ARK_PTX_ATOMICS

#else

template <class T>
ARK_HOST_DEVICE inline T load_acquire(const T& word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

template <class T>
ARK_HOST_DEVICE inline T load_relaxed(const T& word) {
  return __atomic_load_n(&word, __ATOMIC_RELAXED);
}

template <class T>
ARK_HOST_DEVICE inline void store_release(T& word, T value) {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

template <class T>
ARK_HOST_DEVICE inline void store_relaxed(T& word, T value) {
  __atomic_store_n(&word, value, __ATOMIC_RELAXED);
}

template <class T>
ARK_HOST_DEVICE inline T load_ordered(const T& word) {
  return __atomic_load_n(&word, __ATOMIC_SEQ_CST);
}

template <class T>
ARK_HOST_DEVICE inline void store_ordered(T& word, T value) {
  __atomic_store_n(&word, value, __ATOMIC_SEQ_CST);
}

template <class T>
ARK_HOST_DEVICE inline T add_ordered(T& word, T amount) {
  return __atomic_fetch_add(&word, amount, __ATOMIC_SEQ_CST);
}

template <class T>
ARK_HOST_DEVICE inline T add_relaxed(T& word, T amount) {
  return __atomic_fetch_add(&word, amount, __ATOMIC_RELAXED);
}

template <class T>
ARK_HOST_DEVICE inline bool compare_exchange(T& word, T& expected, T desired) {
  return __atomic_compare_exchange_n(&word, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

#endif

}  // namespace ark::protocol
