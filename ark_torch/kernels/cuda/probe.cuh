// Fills memory with a known pattern and adds it up, to check that this GPU runs compiled code and reaches that memory.
// Used by the doctor and the compiler's tests. 16 bytes per thread and iteration, grids of any size; no launch waits
// for another, so nothing here can hang.
#pragma once

#include "cuda/probe.hpp"

namespace ark {

ARK_DEVICE_INLINE uint64 probe_thread() {
  return uint64{blockIdx.x} * blockDim.x + threadIdx.x;
}

ARK_DEVICE_INLINE uint64 probe_threads() {
  return uint64{gridDim.x} * blockDim.x;
}

__device__ inline void probe_fill(const ProbeFill& p) {
  auto* to = static_cast<uint4*>(p.to);
  for (uint64 i = probe_thread(); i < p.chunks; i += probe_threads())
    to[i] = {probe_word(4 * i, p.seed), probe_word(4 * i + 1, p.seed), probe_word(4 * i + 2, p.seed),
             probe_word(4 * i + 3, p.seed)};
}

__device__ inline void probe_sum(const ProbeSum& p) {
  const auto* from = static_cast<const uint4*>(p.from);
  uint64 sum = 0;
  for (uint64 i = probe_thread(); i < p.chunks; i += probe_threads()) {
    const uint4 v = from[i];
    sum += uint64{v.x} + v.y + v.z + v.w;
  }
  if (sum != 0) atomicAdd(p.sum, sum);
}

}  // namespace ark
