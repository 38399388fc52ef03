// Moves bytes between ranks unchanged: all_gather, all_to_all, gather, scatter, broadcast, send and recv are all a list
// of what this rank sends to each peer and receives from it. Any sizes (the two ends of a pair agree) and any
// alignment. Every message has its own warp in a lane, and its size alone determines how it travels.
#pragma once

#include "cuda/message.cuh"

namespace ark::device {

struct MoveParams {
  Rings rings;
  const void* send[kMaxRanks];
  void* receive[kMaxRanks];
  uint64 send_bytes[kMaxRanks];     // 0: nothing; [rank]: must equal receive_bytes[rank], a local copy
  uint64 receive_bytes[kMaxRanks];  // may be received to a buffer that is also sent only if both are the same buffer
  uint32 first_role, roles;  // the warps of a lane in this launch: from 0, all ring_roles(), or the one of one message
};

#if defined(__CUDACC__)

__device__ inline void move(const MoveParams& p) {
  begin_kernel();
  const int ranks = p.rings.ranks, rank = p.rings.rank;
  const uint32 lanes = blockDim.x / 32 / p.roles, warp = threadIdx.x / 32;
  const uint32 lane = blockIdx.x * lanes + warp % lanes;
  const int role = static_cast<int>(p.first_role + warp / lanes);
  if (role == 0) {
    copy_message<Chunks>(p.rings, lane, p.receive[rank], p.send[rank], p.send_bytes[rank]);
  } else if (role < ranks) {
    const int peer = (rank + role) % ranks;
    const uint64 bytes = p.send_bytes[peer];
    if (bytes >= p.rings.chunks_from)
      send_landing<Chunks, Chunks>(p.rings, lane, peer, p.send[peer], bytes);
    else
      send_landing<Lines, Chunks>(p.rings, lane, peer, p.send[peer], bytes);
  } else {
    const int peer = (rank + 2 * ranks - 1 - role) % ranks;
    const uint64 bytes = p.receive_bytes[peer];
    if (bytes >= p.rings.chunks_from)
      receive_landing<Chunks, Chunks>(p.rings, lane, peer, p.receive[peer], bytes);
    else
      receive_landing<Lines, Chunks>(p.rings, lane, peer, p.receive[peer], bytes);
  }
}

#endif

}  // namespace ark::device
