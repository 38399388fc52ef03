// The window between nodes as kernels see it: the memory that a NIC reads and writes, the rings through which they ask
// for writes, and the counts of what has come.
//
// The host makes it (csrc/dma/rdma/gpu_window.hpp). Collectives of their own go through one (cuda/between.cuh), and the
// tasks of a compiled region through another (cuda/loop/between.cuh).
#pragma once

#include "protocol/request_ring.hpp"

namespace ark::device {

inline constexpr int kMostNodes = 64;
inline constexpr uint64 kProbeAfter = 500'000'000;  // ns of waiting for a node, from which on its NIC is probed

// In host memory that the host writes: chunks and credits that came from a node, for a lane.
struct alignas(16) BetweenHeard {
  uint64 chunks, credits;
};

// In the device's own memory, initially zero: how many chunks a lane has exchanged with a node.
struct BetweenPair {
  uint64 sent, received;
};
struct alignas(64) BetweenLane {
  uint64 head, served;  // of the lane's ring: requests posted, and served as last seen
  BetweenPair pairs[kMostNodes];
};

// slots: even, at least 2. memory: inbox slots of all lanes, then outbox slots; alike on all ranks.
struct BetweenWindow {
  char* memory;
  BetweenLane* state;
  protocol::RequestRing* rings;
  const BetweenHeard* heard;  // by lane, then by node
  uint64 chunk_bytes;         // a multiple of 16
  uint32 lanes, slots;
  int nodes, node;
};

// GroupStatus::peer for a rank of another node; numbers below 32 are places in this node.
ARK_HOST_DEVICE constexpr int outside_peer(int rank) {
  return (rank + 1) << 5 | 31;
}
ARK_HOST_DEVICE constexpr bool is_outside(int peer) {
  return peer >= 32;
}
ARK_HOST_DEVICE constexpr int outside_rank(int peer) {
  return (peer >> 5) - 1;
}

ARK_HOST_DEVICE constexpr uint64 between_slot(const BetweenWindow& w, uint32 lane, int node, uint64 number) {
  return ((uint64{lane} * w.nodes + node) * w.slots + number % w.slots) * w.chunk_bytes;
}
ARK_HOST_DEVICE constexpr uint64 between_outbox(const BetweenWindow& w) {
  return uint64{w.lanes} * w.nodes * w.slots * w.chunk_bytes;
}
ARK_HOST_DEVICE constexpr uint64 between_bytes(const BetweenWindow& w) {
  return 2 * between_outbox(w);
}

ARK_HOST_DEVICE constexpr uint64 between_padded(uint64 bytes) {
  return (bytes + 15) / 16 * 16;
}

}  // namespace ark::device
