// Packets: 16 bytes, half data and half the epoch that tells when the data has arrived.
//
// One thread of one peer writes a packet, by a 16-byte store at system scope to memory that this GPU owns; the owner
// polls its own memory. Memory order: protocol/packet.hpp. Epochs only grow, and a slot never holds the awaited epoch
// before its data: slots start as zeros, epochs at 1. Every poll is bounded: Patience checks the group's abort word and
// the clock every 1,024 polls. A thread that gives up reports whom it waited for (the first one wins) and leaves; the
// host raises, and the group is not used again.
#pragma once

#include "cuda/reduce.cuh"
#include "protocol/packet.hpp"

namespace ark::device {

inline constexpr int kMaxBlocks = 256;  // per launch
inline constexpr int kMaxRanks = 8;

// One per rank, in its own device memory. Initially zero.
struct alignas(16) GroupControl {
  uint64 launches[kMaxBlocks];  // collectives done, one word per block, so that no block waits for another
};

// In host memory that the device can write.
struct alignas(64) GroupStatus {
  uint32 abort;  // set by the host: leave
  uint32 gave_up;
  int peer;         // whom the device waited for
  uint32 departed;  // set by the host: bit p is set when rank p has left the group
  uint64 epoch;     // the epoch that did not arrive
};

// The state of copy engines, in the same memory.
struct EngineStatus {
  uint32 busy;      // 1 while they run a collective
  uint32 progress;  // pieces added
  uint32 clock;     // set by the host: increases while it watches
  uint32 beat;      // changes whenever a collective starts
  uint32 expected;  // the mark that is awaited, and from whom (collectives/cuda/copy_engine/copy_engine.hpp); 0: none
};

#if defined(__CUDACC__)

using protocol::load_packet;
using protocol::store_packet;

__device__ __forceinline__ uint64 nanoseconds() {
  uint64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

inline constexpr uint64 kOver = ~uint64{0};

// The slow part of a poll. Returns when the wait began, or kOver to give up. Arguments are by value, so that the poll's
// state stays in registers.
__device__ __forceinline__ uint64 look_up_here(GroupStatus* status, uint64 limit_ns, uint64 began, int peer,
                                               uint64 epoch) {
  const uint64 now = nanoseconds();
  if (*const_cast<const volatile uint32*>(&status->abort) != 0) return kOver;
  if (began == 0) return now;
  // A peer that left has sent all that it ever will; what is in flight arrives within the grace period.
  constexpr uint64 kGrace = 1000000000;
  const bool departed = (*const_cast<const volatile uint32*>(&status->departed) >> (peer & 31) & 1) != 0;
  if (now - began < (departed && limit_ns > kGrace ? kGrace : limit_ns)) return began;
  if (atomicExch_system(&status->gave_up, 1u) == 0) {
    status->peer = peer;
    status->epoch = epoch;
  }
  *const_cast<volatile uint32*>(&status->abort) = 1;
  return kOver;
}
__device__ __noinline__ uint64 look_up(GroupStatus* status, uint64 limit_ns, uint64 began, int peer, uint64 epoch) {
  return look_up_here(status, limit_ns, began, peer, epoch);
}

struct Patience {
  GroupStatus* status;
  uint64 limit_ns;
  uint64 began = 0;
  uint32 turns = 0;

  // Returns true to give up. `peer`: whom the caller waits for.
  __device__ __forceinline__ bool over(int peer, uint64 epoch) {
    if ((++turns & 1023) != 0) return false;
    began = look_up(status, limit_ns, began, peer, epoch);
    return began == kOver;
  }
  // The same without a call, for waits while much is kept in registers.
  __device__ __forceinline__ bool over_here(int peer, uint64 epoch) {
    if ((++turns & 1023) != 0) return false;
    began = look_up_here(status, limit_ns, began, peer, epoch);
    return began == kOver;
  }
};

// A user's buffer in units of 16 bytes. An aligned whole unit is one access; others go byte by byte, not inlined, so
// that the fast path stays compact in the instruction cache.
__device__ __noinline__ Unit load_bytes(const unsigned char* from, int valid) {
  Unit value{0, 0};
#pragma unroll 1
  for (int i = 0; i < valid; i++) (i < 8 ? value.lo : value.hi) |= uint64{from[i]} << (8 * (i & 7));
  return value;
}

__device__ __noinline__ void store_bytes(unsigned char* to, int valid, Unit value) {
#pragma unroll 1
  for (int i = 0; i < valid; i++) to[i] = static_cast<unsigned char>((i < 8 ? value.lo : value.hi) >> (8 * (i & 7)));
}

__device__ __forceinline__ Unit load_unit(const void* buffer, uint64 unit, uint64 bytes, bool aligned) {
  const auto* from = static_cast<const unsigned char*>(buffer) + unit * 16;
  if (aligned && (unit + 1) * 16 <= bytes) return *reinterpret_cast<const Unit*>(from);
  return load_bytes(from, static_cast<int>(min(bytes - unit * 16, uint64{16})));
}

__device__ __forceinline__ void store_unit(void* buffer, uint64 unit, uint64 bytes, bool aligned, const Unit& value) {
  auto* to = static_cast<unsigned char*>(buffer) + unit * 16;
  if (aligned && (unit + 1) * 16 <= bytes)
    *reinterpret_cast<Unit*>(to) = value;
  else
    store_bytes(to, static_cast<int>(min(bytes - unit * 16, uint64{16})), value);
}

// For a kernel launched to overlap the end of the previous one (LaunchMode::overlapped): waits until that one is over
// and its writes are visible. begin_kernel() then releases the next one; in this order, at most one kernel waits.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void begin_kernel() {
  await_previous_kernel();
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The number of this launch in the group's life, from 0. Every thread calls it, at the start and at the end.
__device__ __forceinline__ uint64 begin_launch(const GroupControl* control) {
  return *const_cast<const volatile uint64*>(&control->launches[blockIdx.x]);
}
__device__ __forceinline__ void end_launch(GroupControl* control, uint64 number) {
  __syncthreads();  // all of this block's threads have read the old number
  for (unsigned block = blockIdx.x + threadIdx.x * gridDim.x; block < kMaxBlocks; block += blockDim.x * gridDim.x)
    control->launches[block] = number + 1;
}

#endif

}  // namespace ark::device
