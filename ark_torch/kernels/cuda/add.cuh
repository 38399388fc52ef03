// Adds the contributions to one part that are side by side in this GPU's memory: the work left for SMs when copy
// engines carry the bytes. Sums are float32 in rank order, rounded once, as everywhere. Many small blocks fit between
// those of other kernels; no waits, no shared memory.
#pragma once

#include "cuda/packet.cuh"

namespace ark::device {

struct AddParams {
  const void* parts[kMaxRanks];  // rank r's contribution; out may be one of them
  void* out;
  void* handed_out;  // null, or the buffer from which peers fetch the sum; 16-byte aligned
  uint64 bytes;
  uint32* progress;  // in host memory: incremented by every launch, for monitoring
  uint32 average;
  DType dtype;  // for GenericRule
  ReduceOp op;
  uint16 reserved;
};

inline constexpr int kAddUnits = 4;  // per thread, blockDim apart

#if defined(__CUDACC__)

template <class Rule, int kRanks>
__device__ void add_parts(const AddParams& p, Rule rule) {
  if (blockIdx.x == 0 && threadIdx.x == 0) atomicAdd_system(p.progress, 1u);
  const uint64 units = (p.bytes + 15) / 16;
  const uint64 first = uint64{blockIdx.x} * blockDim.x * kAddUnits + threadIdx.x;
  uint64 places = reinterpret_cast<uint64>(p.out);  // the other buffers have the same alignment
  ARK_UNROLL
  for (int r = 0; r < kRanks; r++) places |= reinterpret_cast<uint64>(p.parts[r]);
  const bool aligned = (places & 15) == 0;
  Unit parts[kAddUnits][kRanks];
  ARK_UNROLL
  for (int i = 0; i < kAddUnits; i++) {
    const uint64 unit = first + i * blockDim.x;
    ARK_UNROLL
    for (int r = 0; r < kRanks; r++)
      if (unit < units) parts[i][r] = load_unit(p.parts[r], unit, p.bytes, aligned);
  }
  ARK_UNROLL
  for (int i = 0; i < kAddUnits; i++) {
    const uint64 unit = first + i * blockDim.x;
    if (unit >= units) continue;
    auto sum = rule.first(parts[i][0]);
    ARK_UNROLL
    for (int r = 1; r < kRanks; r++) rule.add(sum, parts[i][r]);
    const Unit result = rule.finish(sum, kRanks, p.average != 0);
    store_unit(p.out, unit, p.bytes, aligned, result);
    if (p.handed_out != nullptr) store_unit(p.handed_out, unit, p.bytes, aligned, result);
  }
}

#endif

}  // namespace ark::device
