// Reductions by parts: every rank pushes each part of its input to the part's owner. The owner adds all contributions
// in rank order (float32, rounded once) and pushes the result to the receivers. With all ranks as receivers this is a
// two-shot all_reduce, with one a reduce, with none a reduce_scatter.
//
// A lane's warps: one adds, one contributes to every peer, one takes results from every peer. Contributions and results
// have separate rings. If a receiver's buffer is registered, the adder stores the results there and the taker only
// waits for the end (landing.cuh).
#pragma once

#include "cuda/message.cuh"

namespace ark::device {

// No deadlock: takers wait for data only. Adders wait for contributions, for landings, which takers announce first, and
// for credits of takers; contributors wait for credits of adders. In place: an adder overwrites what no one else reads.
// A taker, or the adder in its stead, overwrites a place whose contents that rank's contributor has sent, since the
// result was added from them.

struct TwoShotParams {
  Rings rings;  // of contributions
  Rings results;
  const void* in[kMaxRanks];  // this rank's contribution to each part
  void* out[kMaxRanks];       // where each part's result goes; null: not wanted. out[r] may equal in[r]
  uint64 bytes[kMaxRanks];    // of each part; whole elements
  const double* factors;      // [ranks], 16 bytes apart, for PREMUL_SUM; else null
  uint32 receivers;           // bit r: rank r receives the results
  uint32 average;
  DType dtype;  // for GenericRule
  ReduceOp op;
  uint16 reserved;
};

#if defined(__CUDACC__)

// Adds all contributions to this rank's part, in rank order.
template <class Protocol, class Rule, int kRanks, int kRank>
__device__ __forceinline__ void add_up(const TwoShotParams& p, uint32 lane, Rule rule) {
  constexpr int kRows = kRanks <= 2 ? 4 : kRanks <= 4 ? 2 : 1;  // at a time: registers hold this many of every rank
  constexpr bool kAhead = kRanks <= 2;                          // as many again, requested one piece ahead
  const uint64 bytes = p.bytes[kRank];
  const RingTable& table = Protocol::table(p.rings);
  const Spread spread = spread_of<Protocol>(bytes, Protocol::most_lanes(p.rings));
  Piece<Protocol, kRows> piece;
  piece.find(spread, lane, bytes);
  if (!piece.there) return;
  LaneEnd patience;
  patience.open(p.rings, table, lane, kRank);
  typename Protocol::Receiver from[kRanks];
  typename Protocol::Sender to[kRanks];
  char* lands[kRanks];  // null: by the ring
  double factors[kRanks];
  const auto sends_to = [&](int r) { return r != kRank && (p.receivers >> r & 1) != 0; };
  ARK_UNROLL
  for (int r = 0; r < kRanks; r++) {
    factors[r] = p.factors != nullptr ? p.factors[2 * r] : 1.0;
    if (r != kRank) from[r].open(p.rings, table, lane, r);
    if (sends_to(r)) to[r].open(p.results, Protocol::table(p.results), lane, r);
  }
  using Parts = Unit[kRanks][kRows];
  using Loaded = bool[kRanks];
  Parts parts, next_parts;
  Loaded loaded, next_loaded;
  const auto ask = [&](const Piece<Protocol, kRows>& which, int ahead, Parts& units, Loaded& there) {
    ARK_UNROLL
    for (int r = 0; r < kRanks; r++) {
      if (r == kRank)
        load_piece(p.in[r], bytes, which, units[r]);
      else
        there[r] = from[r].ask(which, ahead, units[r]);
    }
  };
  if (kAhead) ask(piece, 0, next_parts, next_loaded);
  const bool announced = bytes >= p.results.landings_from;
  ARK_UNROLL
  for (int r = 0; r < kRanks; r++) {
    lands[r] = nullptr;
    if (!announced || !sends_to(r)) continue;
    Landing landing;
    landing.open(p.results, lane, r);
    if (!landing.await_address(lands[r])) return;
  }
  while (piece.there) {
    const auto next = piece.after(spread, lane, bytes);
    const bool ends = !next.there || next.step != piece.step;
    if (kAhead) {
      ARK_UNROLL
      for (int r = 0; r < kRanks; r++) {
        loaded[r] = next_loaded[r];
        ARK_UNROLL
        for (int j = 0; j < kRows; j++) parts[r][j] = next_parts[r][j];
      }
      if (next.there) ask(next, static_cast<int>(next.step - piece.step), next_parts, next_loaded);
    } else {
      ask(piece, 0, parts, loaded);
    }
    for (;;) {
      int missing = -1;
      ARK_UNROLL
      for (int r = 0; r < kRanks; r++) {
        if (r == kRank || from[r].arrived(piece, loaded[r], parts[r])) continue;
        missing = r;
        loaded[r] = from[r].ask(piece, 0, parts[r]);
      }
      if (missing < 0) break;
      if (patience.over(missing)) return;
    }
    Unit sums[kRows];
    ARK_UNROLL
    for (int j = 0; j < kRows; j++) {
      typename Rule::Accumulator sum;
      ARK_UNROLL
      for (int r = 0; r < kRanks; r++) {
        const Unit part = r == kRank ? parts[r][j] : Protocol::Receiver::unpacked(parts[r][j]);
        if (r == 0)
          sum = rule.first(part, factors[0]);
        else
          rule.add(sum, part, factors[r]);
      }
      sums[j] = rule.finish(sum, kRanks, p.average != 0);
    }
    ARK_UNROLL
    for (int r = 0; r < kRanks; r++) {
      if (r != kRank && ends) from[r].release();
    }
    ARK_UNROLL
    for (int d = 1; d < kRanks; d++) {
      const int r = (kRank + d) % kRanks;
      if (!sends_to(r)) continue;
      if (lands[r] != nullptr) {
        store_piece(lands[r], bytes, piece, sums);
        continue;
      }
      if (!to[r].put(piece, sums)) return;
      if (ends) to[r].end_step();
    }
    if (p.out[kRank] != nullptr) store_piece(p.out[kRank], bytes, piece, sums);
    piece = next;
  }
  ARK_UNROLL
  for (int r = 0; r < kRanks; r++) {
    if (r != kRank) from[r].close();
    if (!sends_to(r)) continue;
    if (lands[r] == nullptr) {
      to[r].close();
      continue;
    }
    Landing landing;
    landing.open(p.results, lane, r);
    landing.tell_done();
  }
}

template <class Protocol, class Rule, int kRanks, int kRank>
__device__ __forceinline__ void two_shot(const TwoShotParams& p, Rule rule) {
  begin_kernel();
  const uint32 lanes = blockDim.x / 32 / ring_roles(kRanks), warp = threadIdx.x / 32, role = warp / lanes;
  const uint32 lane = blockIdx.x * lanes + warp % lanes;
  if (role == 0) {
    add_up<Protocol, Rule, kRanks, kRank>(p, lane, rule);
  } else if (role < kRanks) {
    const int owner = (kRank + role) % kRanks;
    send_message<Protocol>(p.rings, lane, owner, p.in[owner], p.bytes[owner]);
  } else if ((p.receivers >> kRank & 1) != 0) {
    const int owner = (kRank + 2 * kRanks - 1 - role) % kRanks;
    receive_landing<Protocol, Protocol>(p.results, lane, owner, p.out[owner], p.bytes[owner]);
  }
}

#endif

}  // namespace ark::device
