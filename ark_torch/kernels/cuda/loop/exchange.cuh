// Collectives among the tasks of a loop kernel: a tile pushes what the peers need of it into their memory, as packets
// {data, epoch} (protocol/packet.hpp), waits for theirs in its own, and adds them in rank order as eager collectives do
// (cuda/reduce.cuh), so all ranks get the same bits. Any element type, size and alignment; out may be in.
//
// Places. A collective's packets lie at a place that the plan has given it, the same in each rank's memory:
// [ranks][part], by source, then by element, and as much again for every other step. So ranks need not cut alike: what
// one waits for is elements, whoever pushed them. A packet's epoch is made of the step and the collective's number in
// it. Steps are counted for all launches of the region together (its memory is one set, and its launches follow each
// other on each rank), so a place never holds an epoch before its data.
//
// Memory order. A packet's data and epoch are one access. Rank r may write over what peer p reads, since p has read it:
//  - two steps later, in the same half: r's launch between them had ended, so r had seen all packets of p's (each
//    collective waits for every element from every rank), so p had begun that launch, and the one before it was over;
//  - in the same step, where collective k + 2 l has the place of k: the plan lets no tile of any collective begin
//  before
//    all tiles of the one l before it have ended on its rank. So r had seen all that p pushed in k + l, whose tiles
//    began, on p, when all of k had ended.
//
// Nothing hangs. On each rank tasks are listed in an order that is valid to execute, queues keep that order,
// collectives stand there in the graph's order, which all ranks share (compared when the memory is made), and a worker
// has at most one tile of each (the validator looks). Suppose all wait. On each rank the first task of the list that
// has not ended can only wait for packets; let k be the earliest collective that such a task is of, on any rank. It
// waits for a peer whose first one is of k, too, or of a later collective. In the latter case the peer has pushed all
// of k. In the former all tasks before k have ended there, so each tile of k that has not is the next of its queue, has
// nothing to wait for before it pushes, and has pushed. Either way the packets come.
//
// Host and device code: tests run it with threads as blocks. A Block says which of its threads calls, moves units of a
// user's buffer, and says when a wait is over.
#pragma once

#include "cuda/reduce.cuh"
#include "protocol/packet.hpp"

#include "cuda/loop/types.cuh"

namespace ark::loop {

enum class Exchange : uint32 { all_reduce, all_gather, reduce_scatter, all_to_all };

// One rank's view of a collective's packets.
struct Exchanged {
  char* const* packets;  // of each rank, as mapped here
  uint64 place;          // where the collective's begin
  int rank;
  uint64 epoch;
};

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

// Bytes [begin, end) of a part of `part` bytes, from a multiple of 16 on. Of all_gather and all_to_all `out` has a part
// from every rank, of reduce_scatter and all_to_all `in` one for every rank.
template <Exchange kWhat, device::DType kType, device::ReduceOp kOp, int kRanks, class Block>
ARK_LOOP void exchange(Block& block, const Exchanged& with, const void* in, void* out, uint64 part, uint64 begin,
                       uint64 end) {
  constexpr int kTogether = kRanks < 4 ? kRanks : 4;  // what registers hold
  constexpr bool kFromParts = kWhat == Exchange::reduce_scatter || kWhat == Exchange::all_to_all;
  constexpr bool kToParts = kWhat == Exchange::all_gather || kWhat == Exchange::all_to_all;
  const int rank = with.rank;
  const uint64 epoch = with.epoch;
  const auto slot = [&](int owner, int source) {
    return with.packets[owner] + with.place + source * protocol::packet_bytes(part);
  };
  const auto given = [&](int receiver, uint64 unit) {
    const char* const from = static_cast<const char*>(in) + (kFromParts ? receiver * part : 0);
    return block.load(from, unit, part);
  };
  const auto take = [&](int source, uint64 unit, const device::Unit& value) {
    char* const to = static_cast<char*>(out) + (kToParts ? source * part : 0);
    block.store(to, unit, part, value);
  };
  const uint64 first = begin / 16 + block.thread(), last = (end + 15) / 16;

  for (uint64 unit = first; unit < last; unit += Block::kThreads) {
    device::Unit value = given(rank, unit);
    ARK_UNROLL for (int d = 1; d < kRanks; ++d) {
      const int peer = rank + d < kRanks ? rank + d : rank + d - kRanks;
      if constexpr (kFromParts) value = given(peer, unit);
      protocol::store_unit_packets(slot(peer, rank), unit, value.lo, value.hi, epoch);
    }
  }
  for (uint64 unit = first; unit < last; unit += Block::kThreads) {
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
        if (block.over(missing, epoch)) return;
      }
      ARK_UNROLL for (int i = 0; i < kTogether; ++i) {
        if (from + i >= kRanks) continue;
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

}  // namespace ark::loop
