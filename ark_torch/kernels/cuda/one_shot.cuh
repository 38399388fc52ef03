// One-shot all-reduce by packets, for small tensors: every rank pushes its whole input to every peer and adds all
// inputs in rank order. One hop, no barrier, no fence; any size, alignment and dtype; out may equal in. Rank and number
// of ranks are template constants, so that arrays indexed by rank stay in registers.
#pragma once

#include "cuda/packet.cuh"

namespace ark::device {

// Slots: two sets, used by alternate launches, each with a place per source. Two are enough: a rank in launch n
// overwrites what its peers read in launch n - 2. It has finished launch n - 1, so it received packets of n - 1 from
// every peer, so every peer had started launch n - 1, which the stream allowed only after its launch n - 2. The launch
// number is kept on the device, so a graph's replay needs no host.

struct OneShotParams {
  const void* in;
  void* out;
  uint64 bytes;
  void* slots[kMaxRanks];  // rank r's packet memory as mapped here: [2][ranks][capacity] packets of 16 bytes
  uint64 capacity;         // packets per source and set: at least one_shot_packets(bytes)
  GroupControl* control;
  GroupStatus* status;
  uint64 limit_ns;
  uint32 average;
  DType dtype;  // for GenericRule
  ReduceOp op;
  uint16 reserved;
};

// Units are in groups of 32, low halves first, so that a warp stores 512 consecutive bytes.
ARK_HOST_DEVICE constexpr uint64 one_shot_packets(uint64 bytes) {
  return (bytes + 511) / 512 * 64;
}

#if defined(__CUDACC__)

template <class Rule, int kRanks, int kRank>
__device__ void one_shot_all_reduce(const OneShotParams& p, Rule rule) {
  begin_kernel();
  const uint64 number = begin_launch(p.control), epoch = number + 1;
  const uint64 units = (p.bytes + 15) / 16;
  const uint64 thread = uint64{blockIdx.x} * blockDim.x + threadIdx.x, threads = uint64{gridDim.x} * blockDim.x;
  const bool aligned = ((reinterpret_cast<uint64>(p.in) | reinterpret_cast<uint64>(p.out)) & 15) == 0;
  auto place = [&](int owner, int source, uint64 unit) {
    const uint64 slot = ((number & 1) * kRanks + source) * p.capacity + (unit >> 5) * 64 + (unit & 31);
    return static_cast<char*>(p.slots[owner]) + slot * 16;
  };

  for (uint64 unit = thread; unit < units; unit += threads) {
    const Unit own = load_unit(p.in, unit, p.bytes, aligned);
    ARK_UNROLL
    for (int d = 1; d < kRanks; d++) {
      char* to = place((kRank + d) % kRanks, kRank, unit);
      store_packet(to, own.lo, epoch);
      store_packet(to + 512, own.hi, epoch);
    }
  }
  Patience patience{p.status, p.limit_ns};
  for (uint64 unit = thread; unit < units; unit += threads) {
    Unit parts[kRanks];
    parts[kRank] = load_unit(p.in, unit, p.bytes, aligned);
    for (;;) {  // all packets in flight together
      int missing = -1;
      ARK_UNROLL
      for (int r = 0; r < kRanks; r++) {
        if (r == kRank) continue;
        const char* from = place(kRank, r, unit);
        uint64 low_epoch, high_epoch;
        load_packet(from, parts[r].lo, low_epoch);
        load_packet(from + 512, parts[r].hi, high_epoch);
        if (low_epoch != epoch || high_epoch != epoch) missing = r;
      }
      if (missing < 0) break;
      if (patience.over(missing, epoch)) return;
    }
    auto sum = rule.first(parts[0]);
    ARK_UNROLL
    for (int r = 1; r < kRanks; r++) rule.add(sum, parts[r]);
    store_unit(p.out, unit, p.bytes, aligned, rule.finish(sum, kRanks, p.average != 0));
  }
  end_launch(p.control, number);
}

#endif

}  // namespace ark::device
