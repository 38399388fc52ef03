// What a block of a bulk kernel does with its peers: it agrees with them where a message lands (landing.cuh), and takes
// from its ring what they have stored there. Thread r of a warp holds what belongs to peer r.
#pragma once

#include "cuda/bulk_lane.cuh"
#include "cuda/landing.cuh"

namespace ark::device {

#if defined(__CUDACC__)

// The value held by the peer's thread.
__device__ __forceinline__ uint64 of_peer(uint64 held, int peer) {
  return __shfl_sync(~0u, held, peer);
}

// Polls once; returns true if more than `number` steps have arrived. `there`: steps known to this thread. Always
// acquires: that empties a cache which nothing here uses.
__device__ __forceinline__ bool has_arrived(const uint64& arrived, uint64& there, uint64 number) {
  if (there <= number) there = protocol::load_acquire(arrived);
  return there > number;
}

// Receiver: tells every rank that sends bytes_from(rank) where its message goes. Returns the senders whose message
// lands, as bits.
template <class Bytes>
__device__ __forceinline__ uint32 announce_landings(const Rings& rings, int rank, int ranks, Bytes bytes_from) {
  uint32 landed = 0;
#pragma unroll 1
  for (int r = 0; r < ranks; r++) {
    if (r == rank || bytes_from(r) < rings.landings_from) continue;
    Landing landing;
    landing.open(rings, blockIdx.x, r);
    landing.announce(rings.landing[r]);
    if (rings.landing[r] != nullptr) landed |= 1u << r;
  }
  __syncwarp();
  return landed;
}
__device__ __forceinline__ bool await_landed(const Rings& rings, int ranks, uint32 landed) {
#pragma unroll 1
  for (int r = 0; r < ranks; r++) {
    if ((landed >> r & 1) == 0) continue;
    Landing landing;
    landing.open(rings, blockIdx.x, r);
    landing.resume();
    if (!landing.await_all()) return false;
  }
  return true;
}

// Sender: `lands` becomes where this thread's peer wants its bytes_to(peer); null: in the ring.
template <class Bytes>
__device__ __forceinline__ bool await_landings(const Rings& rings, int rank, int ranks, Bytes bytes_to, char*& lands) {
#pragma unroll 1
  for (int r = 0; r < ranks; r++) {
    if (r == rank || bytes_to(r) < rings.landings_from) continue;
    Landing landing;
    char* address = nullptr;
    landing.open(rings, blockIdx.x, r);
    if (!landing.await_address(address)) return false;
    if (BulkWarp::thread() == r) lands = address;
  }
  return true;
}
// Everything that this block stored must be written.
__device__ __forceinline__ void tell_landed(const Rings& rings, int ranks, uint32 apart) {
#pragma unroll 1
  for (int r = 0; r < ranks; r++) {
    if ((apart >> r & 1) == 0) continue;
    Landing landing;
    landing.open(rings, blockIdx.x, r);
    landing.tell_done();
  }
}

// Whether this rank's peers send it nothing by rings: no bytes, or those that land.
template <class Bytes>
__device__ __forceinline__ bool takes_nothing(const Rings& rings, int rank, int ranks, Bytes bytes_from) {
  bool any = false;
#pragma unroll 1
  for (int r = 0; r < ranks; r++) {
    const uint64 bytes = bytes_from(r);
    const bool lands = bytes >= rings.landings_from && rings.landing[r] != nullptr;
    any = any || (r != rank && bytes != 0 && !lands);
  }
  return !any;
}

// Takes the share(r) of every peer r from the ring to out(r), step by step; `steps`: of the longest share. `received`:
// slots of this thread's peer before this launch.
template <uint32 kSlots = 1, uint32 kStages, class Share, class Out>
__device__ __forceinline__ bool bulk_take(BulkWarp& warp, const BulkRing& ring,
                                          char (&stages)[kStages][kSlots * kBulkChunk], uint64* full, int rank,
                                          int ranks, uint64 received, uint32 steps, Share share, Out out) {
  const uint32 peers = ranks - 1;
  const int thread = BulkWarp::thread();
  uint64 there = 0;  // of this thread's peer
  fence_async_global();
  const auto sender_of = [&](uint32 i) { return static_cast<int>((rank + peers - i % peers) % ranks); };
  const auto number_of = [&](uint32 i) { return of_peer(received, sender_of(i)) + i / peers * kSlots; };
  return bulk_pump<bulk_ahead(kStages, false)>(
      warp, stages, full, steps * peers,
      [&](uint32 i) {
        const int from = sender_of(i);
        const uint64 number = number_of(i);
        if (share(from).size(i / peers) == 0 || of_peer(there, from) > number) return true;
        const bool found = thread == from && has_arrived(*ring.arrived(rank, from), there, number);
        if (__any_sync(~0u, found) == 0) return false;
        fence_async_global();
        return true;
      },
      [&](uint32 i) { return warp.over(sender_of(i)); },
      [&](uint32 i, char* stage, uint64* barrier) {
        const uint64 number = number_of(i);
        warp.load(stage, barrier, ring.slot(rank, sender_of(i), number), padded(share(sender_of(i)).size(i / peers)));
      },
      [&](uint32 i, const char* stage) {
        const int from = sender_of(i);
        const uint32 bytes = share(from).size(i / peers);
        const uint64 number = number_of(i);
        if (bytes != 0) {
          // the slot has been read
          if (warp.leads()) protocol::store_relaxed(*ring.credit(from, rank), number + kSlots);
          warp.store(out(from) + share(from).at(i / peers), stage, bytes);
        }
        if (warp.leads()) bulk_commit();
        return true;
      });
}

#endif

}  // namespace ark::device
