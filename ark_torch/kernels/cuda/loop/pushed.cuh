// Sums over ranks without a collective's task. The producer of a rank's part of an all_reduce stores it as packets to
// the memory of every rank, and each reader of the sum polls all ranks' packets and adds them (packets.cuh): one trip
// over the link between two products. Ranks add the same parts in the same order, so all get the same bits as from the
// eager collective.
#pragma once

#include "cuda/loop/collective.cuh"
#include "cuda/loop/packets.cuh"

namespace ark::loop {

// Places. A sum's packets have a place of their own, the same in each rank's memory: by source, then element, and a
// second copy for every other step. Nothing else is stored there, and every packet is written once per step, so as much
// of the step's number as a packet holds distinguishes it from the two steps before.
//
// Memory order. A packet is one system-scope access on both sides. Rank r overwrites only what peer p read two steps
// before, in the same half: r finished the launch in between, in which some task polled a packet of p's (each sum has a
// reader). So p had started that launch, and its launch before had ended.
//
// No deadlock (see exchange.cuh, whose collectives may be in the same plan). On each rank, tasks are listed stage by
// stage; those that push a sum are at or before its all_reduce in the graph, its readers after it. Suppose all wait.
// Let k be the earliest collective that the first unfinished task of a rank's list waits for. It waits for a peer whose
// first unfinished task waits for k or a later one, and is thus after the place of k. All tasks that push k are before
// that place (or are k's own tiles, which push before they wait), so they have pushed.

#if defined(__CUDACC__)

// The half of the current step, in the memory at `at`.
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

// `to`: the place of rank 0's packet in this rank's memory. Peers come first, since theirs travel further.
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

// Continues a poll for packets of rank `missing`. Packets of this rank's own workers are handled like any others.
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
