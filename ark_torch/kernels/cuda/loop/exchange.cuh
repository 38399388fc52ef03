// Collectives among the tasks of a loop kernel. A tile pushes what peers need of it into their memory as packets {data,
// epoch} (protocol/packet.hpp), waits for theirs in its own memory, and adds them in rank order, as eager collectives
// do (cuda/reduce.cuh), so all ranks get the same bits. Any element type, size and alignment; out may equal in.
//
// Host and device code: tests run it with threads as blocks. A Block says which of its threads calls, moves units of a
// user's buffer, and decides when to give up waiting.
#pragma once

#include "cuda/reduce.cuh"
#include "protocol/packet.hpp"

#include "cuda/loop/types.cuh"

namespace ark::loop {

// Places. The plan gives each collective a place for its packets, the same in each rank's memory: [ranks][part], by
// source, then element, and a second copy for every other step. Ranks may cut tiles differently, since a wait is for
// elements, whoever pushed them. A packet's epoch combines the step with the collective's number in it. Steps are
// counted over all launches of the region (its memory is one set, and its launches follow each other on each rank), so
// no place ever holds an epoch before its data.
//
// Memory order. A packet's data and epoch are one access. Rank r overwrites only what peer p has already read:
//  - Two steps later, in the same half: r finished the launch in between, so it saw all packets of p's (each collective
//    waits for every element from every rank). So p had started that launch, and its launch before had ended.
//  - In the same step, where collective k + 2 l uses the place of k: the plan lets no tile of a collective start before
//    all tiles of the one l before it have ended on its rank. So r saw all that p pushed in k + l, whose tiles started
//    on p after all of k had ended.
//
// No deadlock. On each rank, tasks are listed in a valid execution order and queues keep it. Collectives are in the
// graph's order, which all ranks share (compared when the memory is made), and a worker has at most one tile of each
// (checked by the validator). Suppose all wait. On each rank the first unfinished task of the list can only wait for
// packets. Let k be the earliest collective of such a task on any rank. It waits for a peer whose first unfinished task
// is of k or later. If later, the peer has pushed all of k. If of k, all tasks before k have ended there, so each
// unfinished tile of k is next in its queue, needs nothing before it pushes, and has pushed. The packets arrive either
// way.

enum class Exchange : uint32 { all_reduce, all_gather, reduce_scatter, all_to_all };

// One rank's view of a collective's packets.
struct Exchanged {
  char* const* packets;  // of each rank, as mapped here
  uint64 place;          // offset of the collective's packets
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

// Waits for the packets of ranks [from, from + kTogether), which are loaded together; `own` stands for this rank's.
// slot(source): where a rank's packets come. Returns false if the wait was given up.
template <int kRanks, int kTogether, class Block, class Slot>
ARK_LOOP bool take_packets(Block& block, Slot&& slot, int rank, int from, uint64 unit, const device::Unit& own,
                           uint64 epoch, device::Unit* parts) {
  while (true) {
    int missing = -1;
    ARK_UNROLL for (int i = 0; i < kTogether; ++i) {
      if (from + i == rank)
        parts[i] = own;
      else if (from + i < kRanks && !protocol::load_unit_packets(slot(from + i), unit, parts[i].lo, parts[i].hi, epoch))
        missing = from + i;
    }
    if (missing < 0) return true;
    if (block.over(missing, epoch)) return false;
  }
}

// Bytes [begin, end) of a part of `part` bytes; begin is a multiple of 16. For all_gather and all_to_all `out` has one
// part from every rank; for reduce_scatter and all_to_all `in` has one for every rank.
template <Exchange kWhat, device::DType kType, device::ReduceOp kOp, int kRanks, class Block>
ARK_LOOP void exchange(Block& block, const Exchanged& with, const void* in, void* out, uint64 part, uint64 begin,
                       uint64 end) {
  constexpr int kTogether = kRanks < 4 ? kRanks : 4;  // as many as registers hold
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
      const auto from_source = [&](int source) { return slot(rank, source); };
      if (!take_packets<kRanks, kTogether>(block, from_source, rank, from, unit, own, epoch, parts)) return;
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
