// Sums over ranks without a collective's task: who makes a rank's part of an all_reduce stores it as packets into the
// memory of every rank, and whoever reads the sum polls the packets of all ranks and adds them (packets.cuh): one way
// over the link lies between a product and the next. Ranks read the same parts in the same order: all get the same
// bits, those of the eager collective.
//
// Places. A sum's packets lie at a place of its own, the same in each rank's memory: by source, then by element, and as
// much again for every other step. Nothing else lies there, and every packet is written once in a step, so a step's
// number, as far as a packet has room for it, tells it from the two steps before.
//
// Memory order. A packet is one access of system scope on both sides. Rank r may write over what peer p read two steps
// before, in the same half: r's launch between them had ended, in which some task polled a packet of p's (each sum has
// a reader), so p had begun that launch, and the one before it was over.
//
// Nothing hangs (see exchange.cuh, whose collectives these stand among). On each rank tasks are listed stage after
// stage; who pushes a sum stands where the graph has its all_reduce or before, who reads it behind. Suppose all wait;
// let k be the earliest collective that the first task of a rank's list which has not ended waits for. It waits for a
// peer whose first one waits for k or a later one, thus stands behind the place of k, before which all that push k
// stand (or are k's own tiles, which push before they wait).
#pragma once

#include "cuda/loop/collective.cuh"
#include "cuda/loop/packets.cuh"

namespace ark::loop {

#if defined(__CUDACC__)

// The step's half of what begins there.
template <class P>
ARK_LOOP P* in_turn(char* at, int64_t half) {
  return in_global<P>(at + (worker().step & 1) * half);
}

ARK_LOOP void push_packet(char* to, uint32 packet) {
  asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(to), "r"(packet) : "memory");
}
ARK_LOOP void push_packet(char* to, uint64 packet) {
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(to), "l"(packet) : "memory");
}

// `to`: where rank 0's lies in this rank's memory. Peers first: theirs has the longer way.
template <class T, int kRanks, int64_t kApart>
ARK_LOOP void store_one(Packet<T, kRanks, kApart>* to, float x) {
  using P = Packet<T, kRanks, kApart>;
  const Worker& now = worker();
  const P packet{narrow(x, T{}), P::now()};
  const int64_t at = reinterpret_cast<char*>(to) - now.packets[now.rank] + now.rank * kApart;
  ARK_UNROLL for (int i = 1; i <= kRanks; ++i) {
    const int rank = now.rank + i < kRanks ? now.rank + i : now.rank + i - kRanks;
    if constexpr (sizeof(P) == 4)
      push_packet(now.packets[rank] + at, bits_as<uint32>(packet));
    else
      push_packet(now.packets[rank] + at, bits_as<uint64>(packet));
  }
}

// A poll that rank `missing` has left waiting: for other workers of this one as for any packets.
static __device__ __noinline__ unsigned long long poll_on_ranks(unsigned long long began, int missing) {
  const Worker& now = worker();
  if (missing == kOwn || missing == now.rank) return poll_on(began);
  const TaskEntry* const task = read_now(now.task);
  began = wait_for_peer(Context{shared_address(task)}, began, missing, now.step);
  return began == device::kOver ? 0 : began;
}
template <int kRanks>
ARK_LOOP unsigned long long poll_on(unsigned long long began, int missing, FromRanks<kRanks>) {
  return poll_on_ranks(began, missing);
}

#endif

}  // namespace ark::loop
