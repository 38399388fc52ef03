// The stage of a collective between nodes: each rank exchanges messages with the rank at its place in every other node,
// through memory that a NIC reads and writes.
//
// A message is cut into chunks. The kernel copies a chunk to a slot of its outbox and asks for the NIC's write through
// a request ring (protocol/request_ring.hpp); the host's thread posts it (csrc/dma/rdma/gpu_window.hpp) and counts, in
// pinned memory, what has come from each node. So a graph's replay needs no work of the host's issuing thread. The
// memory is the GPU's where the NIC reaches that, else pinned memory of the host; the kernel does not see a difference.
// Lanes are blocks; each has slots, counts and a ring of its own.
#pragma once

#include "cuda/packet.cuh"
#include "protocol/request_ring.hpp"

namespace ark::device {

// Memory order. A sender's threads write a slot, meet in a barrier, and one thread posts the request after a fence at
// system scope: the host that takes the request, and the NIC that it asks, find the chunk. The host counts an arrival
// with a release after the NIC has reported it; one thread acquires the count, and the barrier behind it orders the
// reads of the others. A receiver's threads have read a slot when they meet in the barrier before its credit is posted.
//
// No deadlock. In step k a lane sends chunk k to every node, then receives chunk k - slots / 2 of every node. A send
// waits for the credit of chunk k - slots, which its receiver gives in step k - slots + slots / 2 < k; a receive in
// step k waits for a send in a step before k. So waits lead to earlier steps alone, of this launch or of those before
// it.

inline constexpr int kMostNodes = 64;
inline constexpr uint32 kMostBetweenLanes = 16;
inline constexpr uint32 kBetweenThreads = 512;
inline constexpr uint64 kLeastOfLane = 64 << 10;  // bytes of a message that are worth a lane

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

struct BetweenParams {
  BetweenWindow window;
  GroupStatus* status;
  uint64 limit_ns;
  int ranks;  // of the group, for averages
  uint32 average;
  DType dtype;  // for GenericRule
  ReduceOp op;
  uint16 reserved;
  int names[kMostNodes];  // the rank that this one exchanges with, by node
  const void* send[kMostNodes];
  void* receive[kMostNodes];
  uint64 send_bytes[kMostNodes];
  uint64 receive_bytes[kMostNodes];
};
static_assert(sizeof(BetweenParams) <= 4096);

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

// Both ends of a message find the same lanes and chunks by its size.
ARK_HOST_DEVICE constexpr uint32 between_lanes(uint64 bytes, uint32 most) {
  const uint64 lanes = (bytes + kLeastOfLane - 1) / kLeastOfLane;
  return lanes < 1 ? 1 : lanes > most ? most : static_cast<uint32>(lanes);
}
struct BetweenPart {
  uint64 begin, bytes;
};
ARK_HOST_DEVICE constexpr BetweenPart between_part(uint64 bytes, uint32 lane, uint32 most) {
  const uint32 lanes = between_lanes(bytes, most);
  if (lane >= lanes) return {0, 0};
  const uint64 each = ((bytes + 15) / 16 + lanes - 1) / lanes * 16;
  const uint64 begin = lane * each < bytes ? lane * each : bytes;
  return {begin, bytes - begin < each ? bytes - begin : each};
}
ARK_HOST_DEVICE constexpr uint64 between_chunks(uint64 bytes, uint64 chunk_bytes) {
  return (bytes + chunk_bytes - 1) / chunk_bytes;
}

#if defined(__CUDACC__)
#define ARK_TEAM_CODE __device__ __forceinline__
#define ARK_TEAM_CALL __device__ __noinline__  // what is long or waits, so that the kernel stays small
#else
#define ARK_TEAM_CODE inline
#define ARK_TEAM_CALL inline
#endif

// A lane's work. Team: the threads that do it; a block on the device (BlockTeam below), one thread in tests of the
// protocol (tests/csrc/support/between_player.hpp).
template <class Team>
struct Between {
  const BetweenParams& p;
  Team& team;
  const uint32 lane;

  ARK_TEAM_CODE BetweenLane& state() const { return p.window.state[lane]; }
  ARK_TEAM_CODE const BetweenHeard& heard(int node) const { return p.window.heard[lane * p.window.nodes + node]; }
  ARK_TEAM_CODE BetweenPart part(uint64 bytes) const { return between_part(bytes, lane, p.window.lanes); }
  ARK_TEAM_CODE uint64 chunks(uint64 bytes) const { return between_chunks(part(bytes).bytes, p.window.chunk_bytes); }
  ARK_TEAM_CODE int other(int distance) const { return (p.window.node + distance) % p.window.nodes; }
  // Chunk k of a message's part in this lane.
  ARK_TEAM_CODE BetweenPart chunk(uint64 bytes, uint64 k) const {
    const BetweenPart all = part(bytes);
    const uint64 begin = k * p.window.chunk_bytes, left = all.bytes - begin;
    return {all.begin + begin, left < p.window.chunk_bytes ? left : p.window.chunk_bytes};
  }

  // One thread of the team. False: given up.
  ARK_TEAM_CALL bool ask(protocol::Request::Kind kind, int node, uint64 to, uint64 from, uint64 bytes) const {
    BetweenLane& own = state();
    protocol::RequestRing& ring = p.window.rings[lane];
    const uint64 number = own.head++;
    while (!protocol::has_room(ring, number, own.served))
      if (team.over(-1, number)) return false;
    protocol::post(ring, number, {kind, static_cast<uint32>(node), to, from, bytes});
    return true;
  }
  ARK_TEAM_CALL bool await(const uint64& count, uint64 least, int node) const {
    while (protocol::load_acquire(count) < least)
      if (team.over(outside_peer(p.names[node]), least)) return false;
    return true;
  }

  ARK_TEAM_CALL bool send(int node, uint64 k) const {
    const BetweenWindow& w = p.window;
    const uint64 number = state().pairs[node].sent + k;
    if (!team.by_one([&] { return number < w.slots || await(heard(node).credits, number - w.slots + 1, node); }))
      return false;
    const BetweenPart piece = chunk(p.send_bytes[node], k);
    const uint64 slot = between_outbox(w) + between_slot(w, lane, node, number);
    team.copy(w.memory + slot, static_cast<const char*>(p.send[node]) + piece.begin, piece.bytes);
    return team.by_one([&] {
      return ask(protocol::Request::put_with_signal, node, between_slot(w, lane, w.node, number), slot, piece.bytes);
    });
  }

  ARK_TEAM_CODE bool arrived(int node, uint64 k) const {
    return await(heard(node).chunks, state().pairs[node].received + k + 1, node);
  }
  ARK_TEAM_CODE const char* inbox(int node, uint64 k) const {
    return p.window.memory + between_slot(p.window, lane, node, state().pairs[node].received + k);
  }
  ARK_TEAM_CODE bool give_credit(int node) const { return ask(protocol::Request::signal, node, 0, 0, 0); }

  // `receive`: takes chunk k of every node that has one, in step k + slots / 2.
  template <class Receive>
  ARK_TEAM_CODE bool run(Receive&& receive) const {
    const BetweenWindow& w = p.window;
    uint64 sends = 0, receives = 0;
    for (int d = 1; d < w.nodes; d++) {
      const uint64 there = chunks(p.send_bytes[other(d)]), here = chunks(p.receive_bytes[other(d)]);
      sends = there > sends ? there : sends;
      receives = here > receives ? here : receives;
    }
    const uint64 lag = w.slots / 2;
    for (uint64 k = 0; k < sends || (receives != 0 && k < receives + lag); k++) {
      for (int d = 1; d < w.nodes; d++)
        if (k < chunks(p.send_bytes[other(d)]) && !send(other(d), k)) return false;
      if (k >= lag && k - lag < receives && !receive(k - lag)) return false;
    }
    return team.by_one([&] {
      for (int d = 1; d < w.nodes; d++) {
        BetweenPair& pair = state().pairs[other(d)];
        pair.sent += chunks(p.send_bytes[other(d)]);
        pair.received += chunks(p.receive_bytes[other(d)]);
      }
      return true;
    });
  }

  // receive[n] = what node n sends; receive[own] = send[own].
  ARK_TEAM_CODE bool move() const {
    const int own = p.window.node;
    if (p.receive[own] != p.send[own]) {
      const BetweenPart piece = part(p.send_bytes[own]);
      team.copy(static_cast<char*>(p.receive[own]) + piece.begin, static_cast<const char*>(p.send[own]) + piece.begin,
                piece.bytes);
    }
    return run([&](uint64 k) {
      for (int d = p.window.nodes - 1; d > 0; d--) {
        const int node = other(d);
        if (k >= chunks(p.receive_bytes[node])) continue;
        if (!team.by_one([&] { return arrived(node, k); })) return false;
        const BetweenPart piece = chunk(p.receive_bytes[node], k);
        team.copy(static_cast<char*>(p.receive[node]) + piece.begin, inbox(node, k), piece.bytes);
        if (!team.by_one([&] { return give_credit(node); })) return false;
      }
      return true;
    });
  }

  // receive[own] = the sum, in the order of nodes, of send[own] and what the other nodes send. receive_bytes is alike
  // for all nodes. The result may take the place of send[own].
  template <class Rule>
  ARK_TEAM_CODE bool add(Rule rule) const {
    const int own = p.window.node, nodes = p.window.nodes;
    const uint64 bytes = p.receive_bytes[own];
    return run([&](uint64 k) {
      const bool here = team.by_one([&] {
        for (int d = nodes - 1; d > 0; d--)
          if (!arrived(other(d), k)) return false;
        return true;
      });
      if (!here) return false;
      const BetweenPart piece = chunk(bytes, k);
      const char* const mine = static_cast<const char*>(p.send[own]) + piece.begin;
      char* const out = static_cast<char*>(p.receive[own]) + piece.begin;
      team.each_unit(piece.bytes, [&](uint64 unit) {
        const auto of = [&](int node) { return team.load(node == own ? mine : inbox(node, k), unit, piece.bytes); };
        auto sum = rule.first(of(0));
        for (int node = 1; node < nodes; node++) rule.add(sum, of(node));
        team.store(out, unit, piece.bytes, rule.finish(sum, p.ranks, p.average != 0));
      });
      return team.by_one([&] {
        for (int d = nodes - 1; d > 0; d--)
          if (!give_credit(other(d))) return false;
        return true;
      });
    });
  }
};

#if defined(__CUDACC__)

// The threads of a block. by_one() is a barrier before and after what one thread does.
struct BlockTeam {
  Patience patience;

  __device__ __forceinline__ bool over(int peer, uint64 awaited) { return patience.over(peer, awaited); }
  template <class Body>
  __device__ __forceinline__ bool by_one(Body&& body) {
    __syncthreads();
    bool given_up = false;
    if (threadIdx.x == 0) {
      patience.began = 0;
      given_up = !body();
    }
    return __syncthreads_or(given_up) == 0;
  }
  template <class Body>
  __device__ __forceinline__ void each_unit(uint64 bytes, Body&& body) {
    for (uint64 unit = threadIdx.x; unit * 16 < bytes; unit += blockDim.x) body(unit);
  }
  __device__ __forceinline__ Unit load(const void* from, uint64 unit, uint64 bytes) const {
    return load_unit(from, unit, bytes, (reinterpret_cast<uint64>(from) & 15) == 0);
  }
  __device__ __forceinline__ void store(void* to, uint64 unit, uint64 bytes, const Unit& value) const {
    store_unit(to, unit, bytes, (reinterpret_cast<uint64>(to) & 15) == 0, value);
  }
  // Several loads are in flight, since those from host memory take a microsecond and more.
  __device__ __noinline__ void copy(void* to, const void* from, uint64 bytes) {
    constexpr int kInFlight = 4;
    const uint64 units = (bytes + 15) / 16;
    for (uint64 unit = threadIdx.x; unit < units; unit += kInFlight * blockDim.x) {
      Unit values[kInFlight];
      ARK_UNROLL
      for (int i = 0; i < kInFlight; i++)
        if (unit + i * blockDim.x < units) values[i] = load(from, unit + i * blockDim.x, bytes);
      ARK_UNROLL
      for (int i = 0; i < kInFlight; i++)
        if (unit + i * blockDim.x < units) store(to, unit + i * blockDim.x, bytes, values[i]);
    }
  }
};

__device__ inline void between_move(const BetweenParams& p) {
  BlockTeam team{{p.status, p.limit_ns}};
  Between<BlockTeam>{p, team, blockIdx.x}.move();
}
template <class Rule>
__device__ void between_add(const BetweenParams& p, Rule rule) {
  BlockTeam team{{p.status, p.limit_ns}};
  Between<BlockTeam>{p, team, blockIdx.x}.add(rule);
}

#endif

}  // namespace ark::device
