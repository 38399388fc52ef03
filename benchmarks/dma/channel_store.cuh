// A channel of plain stores: the threads of a block or warp store, then set a flag word. Any address and size.
//
// Ordering: as in channel.cuh. The release waits until all stores of the team have reached the peer, about a
// microsecond. If many warps have their own channels, the others keep storing meanwhile.
#pragma once

#include "channel.cuh"

namespace ark::device {

#if defined(__CUDACC__)

// Copies bytes by a whole team, with four accesses per thread in flight.
template <class Team>
__device__ __forceinline__ void copy_bytes(void* to, const void* from, uint64 bytes) {
  constexpr int kBatch = 4;
  const bool aligned = ((reinterpret_cast<uint64>(to) | reinterpret_cast<uint64>(from)) & 15) == 0;
  const uint64 units = aligned ? bytes / 16 : 0, step = Team::size();
  auto* to_units = static_cast<Unit*>(to);
  const auto* from_units = static_cast<const Unit*>(from);
  uint64 i = Team::rank();
  for (; i + (kBatch - 1) * step < units; i += kBatch * step) {
    Unit values[kBatch];
    ARK_UNROLL
    for (int j = 0; j < kBatch; j++) values[j] = from_units[i + j * step];
    ARK_UNROLL
    for (int j = 0; j < kBatch; j++) to_units[i + j * step] = values[j];
  }
#pragma unroll 1
  for (; i < units; i += step) to_units[i] = from_units[i];
  auto* to_bytes = static_cast<char*>(to);
  const auto* from_bytes = static_cast<const char*>(from);
#pragma unroll 1
  for (i = units * 16 + Team::rank(); i < bytes; i += step) to_bytes[i] = from_bytes[i];
}

template <class Team>
class StoreSender : public Sender<Team> {
 public:
  using Sender<Team>::Sender;

  __device__ __forceinline__ bool put(void* to, const void* from, uint64 bytes) {
    copy_bytes<Team>(to, from, bytes);
    return true;
  }
  __device__ __forceinline__ bool signal() {
    this->tell();
    return true;
  }
  __device__ __forceinline__ bool put_with_signal(void* to, const void* from, uint64 bytes) {
    put(to, from, bytes);
    return signal();
  }
};

#endif

}  // namespace ark::device
