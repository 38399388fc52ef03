// Broadcast to several peers: the root sends each of them a different part, and each peer relays its part to the
// others. The root's link carries the data once instead of once per peer, and so does every other link.
//
// A lane's warps: one takes this rank's part from the root, one per peer relays it, one per peer takes that peer's
// part. Relayed parts have their own rings. A step is relayed once it is in this rank's buffer: the warp that stored it
// counts steps in shared memory (release within the block), and those that relay it wait for the count (acquire) and
// read the buffer. No deadlock: the taking warp waits for the root only, the root for its credits; relaying warps wait
// for the taking warp and for credits of takers, which wait for data only.
#pragma once

#include "cuda/message.cuh"

namespace ark::device {

struct RelayParams {
  Rings rings;                             // from the root
  Rings handed_on;                         // among the others
  char* data;                              // the whole buffer; the root reads it, the others write it
  uint64 at[kMaxRanks], bytes[kMaxRanks];  // of each rank's part; the root has none
  int root;
  uint32 reserved;
};

#if defined(__CUDACC__)

// As send_message, for bytes whose first `steps` steps have arrived from the root.
template <class Protocol>
__device__ __forceinline__ void hand_on(const Rings& rings, uint32 lane, int peer, const void* from, uint64 bytes,
                                        const uint32* steps, int root) {
  const RingTable& table = Protocol::table(rings);
  const Spread spread = spread_of<Protocol>(bytes, Protocol::most_lanes(rings));
  Piece<Protocol, kMessageRows> piece;
  piece.find(spread, lane, bytes);
  if (!piece.there) return;
  typename Protocol::Sender sender;
  sender.open(rings, table, lane, peer);
  uint32 there = 0;
  while (piece.there) {
    while (there <= piece.step) {
      const uint32 at = static_cast<uint32>(__cvta_generic_to_shared(steps));
      asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(there) : "r"(at) : "memory");
      __syncwarp();
      there = __shfl_sync(~0u, there, 0);
      if (there <= piece.step && sender.over(root)) return;
    }
    Unit units[kMessageRows];
    load_piece(from, bytes, piece, units);
    const auto next = piece.after(spread, lane, bytes);
    if (!sender.put(piece, units)) return;
    if (!next.there || next.step != piece.step) sender.end_step();
    piece = next;
  }
  sender.close();
}

template <class Protocol>
__device__ __forceinline__ void relay_parts(const RelayParams& p, uint32 lane, int role, uint32* steps) {
  const int ranks = p.rings.ranks, rank = p.rings.rank;
  if (role == 0) {
    if (rank == p.root) return;
    const uint32 counter = static_cast<uint32>(__cvta_generic_to_shared(steps));
    receive_message<Protocol>(p.rings, lane, p.root, p.data + p.at[rank], p.bytes[rank], [&](uint64 step) {
      __syncwarp();
      if ((threadIdx.x & 31) == 0)
        asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(counter), "r"(static_cast<uint32>(step) + 1)
                     : "memory");
    });
  } else if (role < ranks) {
    const int peer = (rank + role) % ranks;
    if (rank == p.root)
      send_message<Protocol>(p.rings, lane, peer, p.data + p.at[peer], p.bytes[peer]);
    else if (peer != p.root)
      hand_on<Protocol>(p.handed_on, lane, peer, p.data + p.at[rank], p.bytes[rank], steps, p.root);
  } else {
    const int peer = (rank + 2 * ranks - 1 - role) % ranks;
    if (rank != p.root && peer != p.root)
      receive_message<Protocol>(p.handed_on, lane, peer, p.data + p.at[peer], p.bytes[peer]);
  }
}

__device__ inline void relay(const RelayParams& p) {
  __shared__ uint32 steps[4];  // of each lane of the block
  if (threadIdx.x < 4) steps[threadIdx.x] = 0;
  __syncthreads();
  begin_kernel();
  const uint32 lanes = blockDim.x / 32 / ring_roles(p.rings.ranks), warp = threadIdx.x / 32, own = warp % lanes;
  const uint32 lane = blockIdx.x * lanes + own;
  if (p.bytes[p.root == 0 ? 1 : 0] >= p.rings.chunks_from)  // no part is longer than the first
    relay_parts<Chunks>(p, lane, warp / lanes, steps + own);
  else
    relay_parts<Lines>(p, lane, warp / lanes, steps + own);
}

#endif

}  // namespace ark::device
