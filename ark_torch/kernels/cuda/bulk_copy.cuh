// The bulk copy engine (TMA) as one thread uses it: copies between global and shared memory, and the mbarriers that
// count arrived bytes. Requires compute capability 9.0 (PTX ISA, cp.async.bulk and mbarrier).
#pragma once

#include "cuda/packet.cuh"

namespace ark::device {

#if defined(__CUDACC__)

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint64* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// Before its memory is used for something else.
__device__ __forceinline__ void barrier_end(uint64* barrier) {
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// This thread's arrival, and the bytes of copies to expect.
__device__ __forceinline__ void barrier_expect(uint64* barrier, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Whether the phase of this parity is over; may suspend the thread briefly.
__device__ __forceinline__ bool barrier_passed(uint64* barrier, uint32 parity) {
  uint32 passed;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(passed)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return passed != 0;
}

// The same, suspended for at most a microsecond: for loops that also check for abort.
__device__ __forceinline__ bool barrier_passed_soon(uint64* barrier, uint32 parity) {
  uint32 passed;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2, 1000; selp.u32 %0, 1, 0, p; }"
               : "=r"(passed)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return passed != 0;
}

// Addresses and sizes must be multiples of 16.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32 bytes, uint64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all but the latest kPending groups of this thread are written and visible to it.
template <int kPending>
__device__ __forceinline__ void bulk_wait_written() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
// Waits until all but the latest kPending groups have read their source.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Words through which a block's threads communicate.
__device__ __forceinline__ uint64 load_block(const uint64& word) {
  uint64 value;
  asm volatile("ld.acquire.cta.shared.u64 %0, [%1];" : "=l"(value) : "r"(shared_address(&word)) : "memory");
  return value;
}
__device__ __forceinline__ void store_block(uint64& word, uint64 value) {
  asm volatile("st.release.cta.shared.u64 [%0], %1;" ::"r"(shared_address(&word)), "l"(value) : "memory");
}

// Orders ordinary accesses to global memory and the engine's, both ways.
__device__ __forceinline__ void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// Orders ordinary writes to shared memory before the engine's later reads.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#endif

}  // namespace ark::device
