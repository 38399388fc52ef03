// Collectives among the tasks of a loop kernel: a tile pushes what the peers need of it into their memory, as packets
// {data, epoch} (protocol/packet.hpp), waits for theirs in its own, and adds them in rank order as eager collectives do
// (cuda/reduce.cuh), so all ranks get the same bits. Any element type, size and alignment; out may be in.
//
// Places. Every collective of the plan has its own, of this rank at `slots` and at the same offset of each other's
// memory: [2][ranks][part], by the parity of the step, by source, then by element. So ranks need not cut alike: what one
// waits for is elements, whoever pushed them.
//
// Memory order. A packet's data and epoch are one access. Epochs are the count of steps, which only grows and is one
// for all launches of the region (its memory is one set, and its launches follow each other on each rank), so a place
// never holds an epoch before its data. Why two copies are enough: in step s + 2 rank r writes over what peer p read in
// step s. r's launch s + 1 had ended, so r had seen all packets of p's step s + 1 (each collective waits for every
// element from every rank), so p had begun its launch s + 1, and its launch s was over, with all its reads.
//
// Nothing hangs. On each rank tasks are listed in an order that is valid to execute, queues keep that order,
// collectives stand there in the graph's order, which all ranks share (compared when the memory is made), and a worker
// has at most one tile of each. Suppose all wait, and take each rank's first task of the list that has not ended: it
// waits for packets, of the earliest collective k that is anywhere unfinished on at least one rank. A rank that is
// beyond k has pushed all of it. On a rank whose first one is of k, all tasks before k have ended, so every tile of k
// is the first of its queue, has nothing else to wait for, and pushes before it waits. So that packet comes.
//
// Failure. Waits look at the group's abort word and clock (cuda/packet.cuh) and at the launch's own. Who gives up fills
// in the report and leaves with all workers of the launch; the group has failed then, and the context goes on.
#pragma once

#include "cuda/packet.cuh"

#include "cuda/loop/launch.cuh"

namespace ark::loop {

enum class Exchange : uint32 { all_reduce, all_gather, reduce_scatter, all_to_all };

#if defined(__CUDACC__)

static_assert(kMostRanks == device::kMaxRanks);

template <device::DType kType, device::ReduceOp kOp>
ARK_LOOP constexpr auto rule_of() {
  if constexpr (!device::hot(kType, kOp))
    return device::GenericRule{kType, kOp};
  else if constexpr (kType == device::DType::bf16)
    return device::SumRule<device::BFloat16>{};
  else if constexpr (kType == device::DType::f16)
    return device::SumRule<device::Float16>{};
  else
    return device::SumRule<device::Float32>{};
}

// The slow part of a wait: when it began, or device::kOver when it is time to leave.
static __device__ __noinline__ uint64 wait_for_peer(const Context& context, uint64 began, int peer, uint64 epoch) {
  const Ranks& ranks = context.head->ranks;
  if (!aborted(*context.head)) {
    began = device::look_up(ranks.status, ranks.limit_ns, began, peer, epoch);
    if (began != device::kOver) return began;
    report(*context.head, Failure::peer, context.worker, context.task, context.stage, -1, peer, 0, 0);
  }
  *const_cast<volatile int*>(context.leave) = 1;
  return device::kOver;
}

// Bytes [begin, end) of a part of `part` bytes, from a multiple of 16 on. Of all_gather and all_to_all `out` has a part
// from every rank, of reduce_scatter and all_to_all `in` one for every rank.
template <Exchange kWhat, device::DType kType, device::ReduceOp kOp, int kRanks>
ARK_LOOP void exchange(const Context& context, const void* in, void* out, const char* slots, uint64 part, uint64 begin,
                       uint64 end) {
  constexpr bool kFromParts = kWhat == Exchange::reduce_scatter || kWhat == Exchange::all_to_all;
  constexpr int kTogether = kRanks < 4 ? kRanks : 4;  // what registers hold
  constexpr bool kToParts = kWhat == Exchange::all_gather || kWhat == Exchange::all_to_all;
  const Ranks& ranks = context.head->ranks;
  const int rank = ranks.rank;
  const uint64 epoch = context.step;
  const int64_t place = slots - ranks.packets[rank];
  const auto slot = [&](int owner, int source) {
    return ranks.packets[owner] + place + ((epoch & 1) * kRanks + source) * protocol::packet_bytes(part);
  };
  const auto given = [&](int receiver, uint64 unit) {
    const char* const from = static_cast<const char*>(in) + (kFromParts ? receiver * part : 0);
    return device::load_unit(from, unit, part, (bits_as<uint64>(from) & 15) == 0);
  };
  const auto take = [&](int source, uint64 unit, const device::Unit& value) {
    char* const to = static_cast<char*>(out) + (kToParts ? source * part : 0);
    device::store_unit(to, unit, part, (bits_as<uint64>(to) & 15) == 0, value);
  };
  const uint64 first = begin / 16 + thread(), last = (end + 15) / 16;

  for (uint64 unit = first; unit < last; unit += kThreads) {
    device::Unit value = given(rank, unit);
    ARK_UNROLL for (int d = 1; d < kRanks; ++d) {
      const int peer = rank + d < kRanks ? rank + d : rank + d - kRanks;
      if constexpr (kFromParts) value = given(peer, unit);
      protocol::store_unit_packets(slot(peer, rank), unit, value.lo, value.hi, epoch);
    }
  }
  uint64 began = 0;
  uint32 turns = 0;
  for (uint64 unit = first; unit < last; unit += kThreads) {
    constexpr auto rule = rule_of<kType, kOp>();
    const device::Unit own = given(rank, unit);
    decltype(rule.first(own)) sum;
    ARK_UNROLL for (int from = 0; from < kRanks; from += kTogether) {
      device::Unit parts[kTogether];
      while (true) {  // these packets are asked for together
        int missing = -1;
        ARK_UNROLL for (int i = 0; i < kTogether; ++i) {
          if (from + i == rank)
            parts[i] = own;
          else if (from + i < kRanks &&
                   !protocol::load_unit_packets(slot(rank, from + i), unit, parts[i].lo, parts[i].hi, epoch))
            missing = from + i;
        }
        if (missing < 0) break;
        if ((++turns & 255) != 0) continue;
        began = wait_for_peer(context, began, missing, epoch);
        if (began == device::kOver) return;
      }
      ARK_UNROLL for (int i = 0; i < kTogether && from + i < kRanks; ++i) {
        if constexpr (kToParts)
          take(from + i, unit, parts[i]);
        else if (from + i == 0)
          sum = rule.first(parts[i]);
        else
          rule.add(sum, parts[i]);
      }
    }
    if constexpr (!kToParts) take(rank, unit, rule.finish(sum, kRanks, kOp == device::ReduceOp::avg));
  }
}

#endif

}  // namespace ark::loop
