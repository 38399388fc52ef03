// Reductions by parts: every rank pushes each part of its input to the part's owner, the owner adds all contributions
// in rank order (float32, rounded once) and pushes the result to whoever is to have it. With all ranks receiving it is
// a two-shot all_reduce, with one a reduce, with none a reduce_scatter.
//
// Liveness: in turn i a lane sends step i of every part to its owner, then adds step i - 1 of its own part and sends
// the results, then takes the results of step i - 2. Senders and receivers of a pair thus have the same order of steps
// (S0, S1, G0, S2, G1, ...), and a send waits only for credits that the peer gave at least one turn before: by
// induction over turns every rank reaches every turn.
#pragma once

#include "cuda/ring.cuh"

namespace ark::device {

struct TwoShotParams {
  Rings rings;
  const void* in[kMaxRanks];  // this rank's contribution to each part
  void* out[kMaxRanks];       // where the result of each part goes here; null: not wanted. out[r] may be in[r]
  uint64 bytes[kMaxRanks];    // of each part; whole elements
  const double* factors;      // [ranks], 16 bytes apart, for PREMUL_SUM; else null
  uint32 receivers;           // bit r: rank r is sent the results
  uint32 most_lanes;
  uint32 average;
  DType dtype;  // for GenericRule
  ReduceOp op;
  uint16 reserved;
};

#if defined(__CUDACC__)

template <class Rule, int kRanks>
__device__ void two_shot(const TwoShotParams& p, Rule rule) {
  begin_kernel();
  Lane lane(p.rings);
  const int rank = p.rings.rank;
  double factors[kRanks];
  ARK_UNROLL
  for (int r = 0; r < kRanks; r++) factors[r] = p.factors != nullptr ? p.factors[2 * r] : 1.0;
  const bool takes = (p.receivers >> rank & 1) != 0;
  constexpr int kGroup = kRanks <= 4 ? (kRanks > 1 ? kRanks - 1 : 1) : 2;  // peers whose loads are under way together
  const auto wrapped = [](int r) { return r < kRanks ? r : r - kRanks; };
  const auto rows_left = [](uint64 bytes, uint64 row) { return (bytes - row * kRowData + kRowData - 1) / kRowData; };
  Unit units[kStepRows];
  uint64 row;
  bool more = true;
  for (uint64 i = 0; more; i++) {
    more = false;
    ARK_UNROLL
    for (int from = 1; from < kRanks; from += kGroup) {  // my contributions
      Unit parts[kGroup][kStepRows];
      ARK_UNROLL
      for (int g = 0; g < kGroup; g++) {
        const int owner = wrapped(rank + from + g);
        const Spread spread = spread_of(p.bytes[owner], p.most_lanes);
        if (from + g >= kRanks || !lane.has(spread, p.bytes[owner], i, row)) continue;
        lane.load(p.in[owner], p.bytes[owner], spread, row, parts[g]);
      }
      ARK_UNROLL
      for (int g = 0; g < kGroup; g++) {
        const int owner = wrapped(rank + from + g);
        const Spread spread = spread_of(p.bytes[owner], p.most_lanes);
        if (from + g >= kRanks || !lane.has(spread, p.bytes[owner], i, row)) continue;
        more = true;
        if (!lane.send(owner, spread, rows_left(p.bytes[owner], row), parts[g])) return;
      }
    }
    const uint64 own = p.bytes[rank];
    const Spread spread = spread_of(own, p.most_lanes);
    if (lane.has(spread, own, i, row)) more = true;
    if (i > 0 && lane.has(spread, own, i - 1, row)) {  // my part
      more = true;
      const uint64 left = rows_left(own, row);
      lane.load(p.in[rank], own, spread, row, units);
      Unit raw[kRanks][kStepRows];
      for (;;) {  // all peers' loads in flight together
        ARK_UNROLL
        for (int r = 0; r < kRanks; r++) {
          if (r != rank) lane.poll(r, spread, left, raw[r]);
        }
        int missing = -1;
        ARK_UNROLL
        for (int r = 0; r < kRanks; r++) {
          if (r != rank && !__all_sync(~0u, lane.arrived(r, spread, left, raw[r]))) missing = r;
        }
        if (missing < 0) break;
        if (lane.over(missing)) return;
      }
      ARK_UNROLL
      for (int r = 0; r < kRanks; r++) {
        if (r != rank) lane.release(r);
      }
      ARK_UNROLL
      for (int j = 0; j < kStepRows; j++) {
        if (j >= static_cast<int>(spread.rows)) continue;
        typename Rule::Accumulator sum;
        ARK_UNROLL
        for (int r = 0; r < kRanks; r++) {
          const Unit theirs = lane.unpacked(raw[r][j]);
          const Unit part = r == rank ? units[j] : theirs;
          if (r == 0)
            sum = rule.first(part, factors[0]);
          else
            rule.add(sum, part, factors[r]);
        }
        units[j] = rule.finish(sum, kRanks, p.average != 0);
      }
      ARK_UNROLL
      for (int d = 1; d < kRanks; d++) {
        const int to = rank + d < kRanks ? rank + d : rank + d - kRanks;
        if ((p.receivers >> to & 1) != 0 && !lane.send(to, spread, left, units)) return;
      }
      if (p.out[rank] != nullptr) lane.store(p.out[rank], own, spread, row, units);
    }
    if (!takes) continue;
    ARK_UNROLL
    for (int from = 1; from < kRanks; from += kGroup) {  // the others' results
      Unit raw[kGroup][kStepRows];
      ARK_UNROLL
      for (int g = 0; g < kGroup; g++) {
        const int owner = wrapped(rank + kRanks - from - g);
        const Spread spread = spread_of(p.bytes[owner], p.most_lanes);
        if (from + g >= kRanks) continue;
        if (i > 0 && lane.has(spread, p.bytes[owner], i - 1, row)) more = true;
        if (i < 2 || !lane.has(spread, p.bytes[owner], i - 2, row)) continue;
        lane.poll(owner, spread, rows_left(p.bytes[owner], row), raw[g]);
      }
      ARK_UNROLL
      for (int g = 0; g < kGroup; g++) {
        const int owner = wrapped(rank + kRanks - from - g);
        const Spread spread = spread_of(p.bytes[owner], p.most_lanes);
        if (from + g >= kRanks || i < 2 || !lane.has(spread, p.bytes[owner], i - 2, row)) continue;
        more = true;
        if (!lane.take(owner, spread, rows_left(p.bytes[owner], row), raw[g], units)) return;
        lane.store(p.out[owner], p.bytes[owner], spread, row, units);
      }
    }
  }
  lane.close();
}

#endif

}  // namespace ark::device
