// Moves bytes between ranks as they are: all_gather, all_to_all, gather, scatter, small broadcasts, send and recv are
// all a list of what this rank sends to each peer and receives from it. Any sizes (the two ends of a pair agree), any
// alignment.
//
// Liveness: in turn i a lane sends its step i to every peer, then takes step i - 1 from every peer. A send waits for a
// credit of step i - kRingDepth, which the peer gave in its turn i - kRingDepth + 1 < i: by induction over turns every
// rank reaches every turn, whatever the sizes. A kernel that only sends, or only receives, waits for nothing else.
#pragma once

#include "cuda/ring.cuh"

namespace ark::device {

struct MoveParams {
  Rings rings;
  const void* send[kMaxRanks];
  void* receive[kMaxRanks];
  uint64 send_bytes[kMaxRanks];     // 0: nothing; [rank]: must equal receive_bytes[rank], a copy
  uint64 receive_bytes[kMaxRanks];  // a buffer that is sent may be received into only where it is the same one
  uint32 most_lanes;                // equal on all ranks
  uint32 same;                      // every peer is sent the same: load it once
};

#if defined(__CUDACC__)

__device__ inline void move(const MoveParams& p) {
  begin_kernel();
  Lane lane(p.rings);
  const int ranks = p.rings.ranks, rank = p.rings.rank;
  Unit units[kStepRows];
  bool more = true;
  for (uint64 i = 0; more; i++) {
    more = false;
    bool loaded = false;
    for (int d = 0; d < ranks; d++) {
      const int peer = rank + d < ranks ? rank + d : rank + d - ranks;
      const uint64 bytes = p.send_bytes[peer];
      const Spread spread = spread_of(bytes, p.most_lanes);
      uint64 row;
      if (!lane.has(spread, bytes, i, row)) continue;
      more = true;
      if (d == 0 && p.receive[rank] == p.send[rank]) continue;
      if (!loaded || p.same == 0) lane.load(p.send[peer], bytes, spread, row, units);
      loaded = true;
      if (d == 0) {
        lane.store(p.receive[rank], bytes, spread, row, units);
        continue;
      }
      if (!lane.send(peer, spread, (bytes - row * kRowData + kRowData - 1) / kRowData, units)) return;
    }
    for (int d = 1; d < ranks; d++) {
      const int peer = rank - d >= 0 ? rank - d : rank - d + ranks;
      const uint64 bytes = p.receive_bytes[peer];
      const Spread spread = spread_of(bytes, p.most_lanes);
      uint64 row;
      if (lane.has(spread, bytes, i, row)) more = true;
      if (i == 0 || !lane.has(spread, bytes, i - 1, row)) continue;
      more = true;
      if (!lane.receive(peer, spread, (bytes - row * kRowData + kRowData - 1) / kRowData, units)) return;
      lane.store(p.receive[peer], bytes, spread, row, units);
    }
  }
  lane.close();
}

#endif

}  // namespace ark::device
