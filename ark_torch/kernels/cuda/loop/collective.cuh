// Collectives as tasks: exchange.cuh, run by all threads of a block.
//
// Failure: waits check the group's abort word and clock (cuda/packet.cuh), and the launch's own. Whoever gives up
// writes the report and leaves, with all workers of the launch. The group has then failed, but the context survives.
#pragma once

#include "cuda/packet.cuh"

#include "cuda/loop/exchange.cuh"
#include "cuda/loop/failure.cuh"

namespace ark::loop {

#if defined(__CUDACC__)

static_assert(kMostRanks == device::kMaxRanks);

// The slow part of a wait for a rank of the node, by its place, or for a device::outside_peer(): returns when the wait
// began, or device::kOver if it must be given up.
static __device__ __noinline__ uint64 wait_for_peer(Context context, uint64 began, int peer, uint64 epoch) {
  const Worker& here = worker();
  const Ranks& ranks = here.head->ranks;
  if (*const_cast<volatile int*>(here.leave) != 0) return device::kOver;
  if (!is_to_look()) return began == 0 ? now_ns() : began;
  if (!aborted(*here.head)) {
    began = device::look_up(ranks.status, ranks.limit_ns, began, peer, epoch);
    if (began != device::kOver) return began;
    const int rank = device::is_outside(peer) ? device::outside_rank(peer) : ranks.names[peer];
    report(*here.head, Failure::peer, here.number, context.task().task, context.task().stage, -1, rank, 0, 0);
  }
  *const_cast<volatile int*>(here.leave) = 1;
  return device::kOver;
}

struct BlockExchange {
  static constexpr int kThreads = loop::kThreads;
  const Context context;
  uint64 began = 0;
  uint32 turns = 0;

  ARK_LOOP int thread() const { return loop::thread(); }
  ARK_LOOP device::Unit load(const char* from, uint64 unit, uint64 bytes) const {
    return device::load_unit(from, unit, bytes, (bits_as<uint64>(from) & 15) == 0);
  }
  ARK_LOOP void store(char* to, uint64 unit, uint64 bytes, const device::Unit& value) const {
    device::store_unit(to, unit, bytes, (bits_as<uint64>(to) & 15) == 0, value);
  }
  ARK_LOOP bool over(int peer, uint64 epoch) {
    if ((++turns & 255) != 0) return false;
    began = wait_for_peer(context, began, peer, epoch);
    return began == device::kOver;
  }
};

// `place`: address of this rank's packets of the collective. `number`: a pointer whose distance from the first packets
// is the collective's number (from 1) in the step. `half`: bytes of all places of a step.
template <Exchange kWhat, device::DType kType, device::ReduceOp kOp, int kRanks>
ARK_LOOP void exchange(const Context& context, const void* in, void* out, const char* place, const char* number,
                       uint64 half, uint64 part, uint64 begin, uint64 end) {
  const Worker& here = worker();
  const Ranks& ranks = here.head->ranks;
  const char* const first = ranks.packets[ranks.rank];
  const Exchanged with{ranks.packets, place - first + (here.step & 1) * half, ranks.rank,
                       uint64{here.step} << 32 | static_cast<uint64>(number - first)};
  BlockExchange block{context};
  exchange<kWhat, kType, kOp, kRanks>(block, with, in, out, part, begin, end);
}

#endif

}  // namespace ark::loop
