// The stage of a collective between nodes: each rank exchanges messages with the rank at its place in every other node,
// through memory that a NIC reads and writes.
//
// A message is cut into chunks. The kernel copies a chunk to a slot of its outbox and asks for the NIC's write through
// a request ring (protocol/request_ring.hpp); the host's thread posts it (csrc/dma/rdma/gpu_window.hpp) and counts, in
// pinned memory, what has come from each node. So a graph's replay needs no work of the host's issuing thread. The
// memory is the GPU's where the NIC reaches that, else pinned memory of the host; the kernel does not see a difference.
// Lanes are blocks; each has slots, counts and a ring of its own.
//
// Sums come in three forms. Nodes send each other what their ranks' sum is, in the tensors' type; or that sum as it was
// added, in float32 (add_wide), so that only the last sum is rounded; or the inputs of all their ranks, side by side in
// a slot, which are added in the order of all ranks. The last two take the inputs of the node's other ranks from the
// device's memory, where an all_to_all of the node has brought them. PREMUL_SUM multiplies where a kernel first reads
// an input, in the accumulator; nodes that bring their rounded sum have multiplied in the node.
#pragma once

#include "cuda/between_window.cuh"
#include "cuda/packet.cuh"

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

inline constexpr uint32 kMostBetweenLanes = 16;
inline constexpr uint32 kBetweenThreads = 512;
inline constexpr uint64 kLeastOfLane = 64 << 10;  // bytes of a message that are worth a lane
inline constexpr int kMostPlaces = kMaxRanks;     // ranks of a node

// The inputs of a sum that a node brings to what another node adds up. One: its sum, or its only rank's. Else `count`,
// one of each of its ranks: that of place `own` where BetweenParams::send says, the one of place i for node n at others
// + i * stride + at[n]. order: in which the `all` inputs of all nodes are added (but by add_wide), as node *
// kMostPlaces
// + place; nodes may bring different numbers of them.
struct BetweenParts {
  const char* others;
  uint64 stride;
  uint64 at[kMostNodes];
  int count, own, all;
  uint16 order[kMostNodes * kMostPlaces];
};

// move: no sum. add_wide: partial sums in float32.
enum class BetweenForm : uint8 { move, add, add_wide };

inline constexpr uint64 kFactorStride = 2;  // doubles, so that each factor moves as one unit

struct BetweenParams {
  BetweenWindow window;
  GroupStatus* status;
  uint64 limit_ns;
  int ranks;  // of the group, for averages
  uint32 average;
  DType dtype;  // for GenericRule
  ReduceOp op;
  uint16 reserved;
  // For PREMUL_SUM of inputs, else null: a factor for each, by node * kMostPlaces + place, kFactorStride apart.
  const double* factors;
  uint64 piece_bytes;  // of a message, in a chunk: a multiple of 16
  BetweenParts parts;
  int names[kMostNodes];  // the rank that this one exchanges with, by node
  const void* send[kMostNodes];
  void* receive[kMostNodes];
  uint64 send_bytes[kMostNodes];
  uint64 receive_bytes[kMostNodes];
};
static_assert(sizeof(BetweenParams) <= 4096);

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
  ARK_TEAM_CODE uint64 chunks(uint64 bytes) const { return between_chunks(part(bytes).bytes, p.piece_bytes); }
  ARK_TEAM_CODE int other(int distance) const { return (p.window.node + distance) % p.window.nodes; }
  // Chunk k of a message's part in this lane.
  ARK_TEAM_CODE BetweenPart chunk(uint64 bytes, uint64 k) const {
    const BetweenPart all = part(bytes);
    const uint64 begin = k * p.piece_bytes, left = all.bytes - begin;
    return {all.begin + begin, left < p.piece_bytes ? left : p.piece_bytes};
  }
  // What this node's rank at a place gives for a node's sum.
  ARK_TEAM_CODE const char* input(int node, int place) const {
    if (place == p.parts.own) return static_cast<const char*>(p.send[node]);
    return p.parts.others + place * p.parts.stride + p.parts.at[node];
  }

  ARK_TEAM_CODE double factor(int node, int place) const {
    return p.factors == nullptr ? 1.0 : p.factors[kFactorStride * (node * kMostPlaces + place)];
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
  // A write to a lost peer fails, which ends the group; a rank that has sent everything makes none but its probes.
  ARK_TEAM_CALL bool await(const uint64& count, uint64 least, int node) const {
    while (protocol::load_acquire(count) < least) {
      if (team.over(outside_peer(p.names[node]), least)) return false;
      if (team.waits_long() && !ask(protocol::Request::probe, node, 0, 0, 0)) return false;
    }
    return true;
  }

  // `fill` writes chunk k for the node to the slot and returns the bytes that go.
  template <class Fill>
  ARK_TEAM_CODE bool send(int node, uint64 k, Fill&& fill) const {
    const BetweenWindow& w = p.window;
    const uint64 number = state().pairs[node].sent + k;
    if (!team.by_one([&] { return number < w.slots || await(heard(node).credits, number - w.slots + 1, node); }))
      return false;
    const uint64 slot = between_outbox(w) + between_slot(w, lane, node, number);
    const uint64 bytes = fill(w.memory + slot, chunk(p.send_bytes[node], k));
    return team.by_one([&] {
      return ask(protocol::Request::put_with_signal, node, between_slot(w, lane, w.node, number), slot, bytes);
    });
  }
  // The inputs themselves, side by side.
  ARK_TEAM_CALL bool send_inputs(int node, uint64 k) const {
    return send(node, k, [&](char* slot, const BetweenPart& piece) {
      const uint64 each = between_padded(piece.bytes);
      for (int i = 0; i < p.parts.count; i++) team.copy(slot + i * each, input(node, i) + piece.begin, piece.bytes);
      return (p.parts.count - 1) * each + piece.bytes;
    });
  }

  ARK_TEAM_CODE bool arrived(int node, uint64 k) const {
    return await(heard(node).chunks, state().pairs[node].received + k + 1, node);
  }
  ARK_TEAM_CODE const char* inbox(int node, uint64 k) const {
    return p.window.memory + between_slot(p.window, lane, node, state().pairs[node].received + k);
  }
  ARK_TEAM_CODE bool give_credit(int node) const { return ask(protocol::Request::signal, node, 0, 0, 0); }

  ARK_TEAM_CODE bool all_arrived(uint64 k) const {
    return team.by_one([&] {
      for (int d = p.window.nodes - 1; d > 0; d--)
        if (!arrived(other(d), k)) return false;
      return true;
    });
  }
  ARK_TEAM_CODE bool give_credits() const {
    return team.by_one([&] {
      for (int d = p.window.nodes - 1; d > 0; d--)
        if (!give_credit(other(d))) return false;
      return true;
    });
  }

  // `send`: gives a node its chunk k, in step k. `receive`: takes chunk k of every node that has one, in step k + slots
  // / 2.
  template <class Send, class Receive>
  ARK_TEAM_CODE bool run(Send&& send, Receive&& receive) const {
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
    const auto give = [&](int node, uint64 k) { return send_inputs(node, k); };
    return run(give, [&](uint64 k) {
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

  // receive[own] = the sum, in p.parts.order, of this node's inputs and those that the other nodes send. receive_bytes
  // is alike for all nodes. The result may take the place of send[own].
  template <class Rule>
  ARK_TEAM_CODE bool add(Rule rule) const {
    const int own = p.window.node, inputs = p.parts.all;
    const auto give = [&](int node, uint64 k) { return send_inputs(node, k); };
    return run(give, [&](uint64 k) {
      if (!all_arrived(k)) return false;
      const BetweenPart piece = chunk(p.receive_bytes[own], k);
      const uint64 each = between_padded(piece.bytes);
      char* const out = static_cast<char*>(p.receive[own]) + piece.begin;
      team.each_unit(piece.bytes, [&](uint64 unit) {
        const auto of = [&](int i) {
          const int node = p.parts.order[i] / kMostPlaces, place = p.parts.order[i] % kMostPlaces;
          return team.load(node == own ? input(own, place) + piece.begin : inbox(node, k) + place * each, unit,
                           piece.bytes);
        };
        const auto times = [&](int i) {
          return factor(p.parts.order[i] / kMostPlaces, p.parts.order[i] % kMostPlaces);
        };
        auto sum = rule.first(of(0), times(0));
        for (int i = 1; i < inputs; i++) rule.add(sum, of(i), times(i));
        team.store(out, unit, piece.bytes, rule.finish(sum, p.ranks, p.average != 0));
      });
      return give_credits();
    });
  }

  // The sum of what this node's ranks give for a node, not rounded.
  template <class Rule>
  ARK_TEAM_CODE typename Rule::Accumulator own_sum(Rule rule, int node, const BetweenPart& piece, uint64 unit) const {
    const int own = p.window.node;
    auto sum = rule.first(team.load_here(input(node, 0) + piece.begin, unit, piece.bytes), factor(own, 0));
    ARK_ROLLED
    for (int i = 1; i < p.parts.count; i++)
      rule.add(sum, team.load_here(input(node, i) + piece.begin, unit, piece.bytes), factor(own, i));
    return sum;
  }
  template <class Rule>
  ARK_TEAM_CODE typename Rule::Accumulator sum_of(Rule rule, int node, const BetweenPart& piece, uint64 k,
                                                  uint64 unit) const {
    if (node == p.window.node) return own_sum(rule, node, piece, unit);
    typename Rule::Accumulator sum;
    for (int i = 0; i < rule.scalars() / 4; i++)
      team.load_floats(rule.lanes(sum) + 4 * i, inbox(node, k), unit * (rule.scalars() / 4) + i);
    return sum;
  }
  // As add(), of each node's inputs first, whose sum goes in float32, then in the order of nodes.
  template <class Rule>
  ARK_TEAM_CODE bool add_wide(Rule rule) const {
    const auto give = [&](int node, uint64 k) {
      return send(node, k, [&](char* slot, const BetweenPart& piece) {
        team.each_unit(piece.bytes, [&](uint64 unit) {
          auto sum = own_sum(rule, node, piece, unit);
          for (int i = 0; i < rule.scalars() / 4; i++)
            team.store_floats(slot, unit * (rule.scalars() / 4) + i, rule.lanes(sum) + 4 * i);
        });
        return between_padded(piece.bytes) * (rule.scalars() / 4);
      });
    };
    return run(give, [&](uint64 k) {
      if (!all_arrived(k)) return false;
      const BetweenPart piece = chunk(p.receive_bytes[p.window.node], k);
      char* const out = static_cast<char*>(p.receive[p.window.node]) + piece.begin;
      team.each_unit(piece.bytes, [&](uint64 unit) {
        auto sum = sum_of(rule, 0, piece, k, unit);
        ARK_ROLLED
        for (int node = 1; node < p.window.nodes; node++) rule.merge(sum, sum_of(rule, node, piece, k, unit));
        team.store(out, unit, piece.bytes, rule.finish(sum, p.ranks, p.average != 0));
      });
      return give_credits();
    });
  }
};

#if defined(__CUDACC__)

// The threads of a block. by_one() is a barrier before and after what one thread does.
struct BlockTeam {
  Patience patience;
  uint64 probed = 0;

  __device__ __forceinline__ bool over(int peer, uint64 awaited) { return patience.over(peer, awaited); }
  // True once for each time of kProbeAfter that passes.
  __device__ __forceinline__ bool waits_long() {
    if (patience.began == 0 || (patience.turns & 1023) != 0) return false;
    const uint64 now = nanoseconds();
    if (now - max(patience.began, probed) < kProbeAfter) return false;
    probed = now;
    return true;
  }
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
  // The same without a call, while a sum is kept in registers.
  __device__ __forceinline__ Unit load_here(const void* from, uint64 unit, uint64 bytes) const {
    const auto* const at = static_cast<const unsigned char*>(from) + unit * 16;
    if ((reinterpret_cast<uint64>(from) & 15) == 0 && (unit + 1) * 16 <= bytes)
      return *reinterpret_cast<const Unit*>(at);
    Unit value{0, 0};
    ARK_ROLLED
    for (int i = 0; i < 16 && unit * 16 + i < bytes; i++)
      (i < 8 ? value.lo : value.hi) |= uint64{at[i]} << (8 * (i & 7));
    return value;
  }
  __device__ __forceinline__ void store(void* to, uint64 unit, uint64 bytes, const Unit& value) const {
    store_unit(to, unit, bytes, (reinterpret_cast<uint64>(to) & 15) == 0, value);
  }
  // Four floats in a slot, which is aligned.
  __device__ __forceinline__ void load_floats(float* values, const void* from, uint64 unit) const {
    const Unit four = static_cast<const Unit*>(from)[unit];
    values[0] = bits_as<float>(static_cast<uint32>(four.lo)),
    values[1] = bits_as<float>(static_cast<uint32>(four.lo >> 32));
    values[2] = bits_as<float>(static_cast<uint32>(four.hi)),
    values[3] = bits_as<float>(static_cast<uint32>(four.hi >> 32));
  }
  __device__ __forceinline__ void store_floats(void* to, uint64 unit, const float* values) const {
    const auto pair = [](float low, float high) { return bits_as<uint32>(low) | uint64{bits_as<uint32>(high)} << 32; };
    static_cast<Unit*>(to)[unit] = {pair(values[0], values[1]), pair(values[2], values[3])};
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
template <class Rule>
__device__ void between_add_wide(const BetweenParams& p, Rule rule) {
  BlockTeam team{{p.status, p.limit_ns}};
  Between<BlockTeam>{p, team, blockIdx.x}.add_wide(rule);
}

#endif

}  // namespace ark::device
