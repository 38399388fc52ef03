// all_reduce of a group over several nodes among the tasks of a loop kernel: a tile's sum over the node by packets
// (exchange.cuh), then over the nodes by messages that the task asks a NIC for through a request ring.
//
// Every rank brings its node's whole sum to the ranks at its place in the other nodes, in one hop, as small collectives
// of their own do; the host's thread posts the writes and counts arrivals (csrc/dma/rdma/gpu_window.hpp). The sum goes
// unrounded, in float32, and nodes are added in their order, so the bits are those of cuda/between.cuh. Only types and
// operations that device::hot() names. Host and device code, as exchange.cuh.
#pragma once

#include "cuda/between_window.cuh"

#include "cuda/loop/collective.cuh"
#include "cuda/loop/exchange.cuh"

namespace ark::loop {

// Lanes. A part is cut into chunks, and each chunk of a collective has a lane of the window by the graph alone: [place]
// [chunk]. A lane's uses follow each other on its rank, as those of a place do (exchange.cuh), so that one worker at a
// time has it; its state goes from one to the next by the plan's events, or by the end of a step. A use sends one
// message to every other node and takes one from each. Messages of a lane and a node arrive in order, so a count tells
// of each.
//
// Memory order. As in cuda/between.cuh: a barrier and a fence before the post, an acquire of the count and a barrier
// before the reads. Message n goes to the slot of message n - 2, here and at the peer. Whoever sends n has ended its
// use n - 1, with every node's message n - 1; its sender had ended its use n - 2 by then. So all had read their
// messages n - 2, and the NIC had read this rank's. No credit is needed.
//
// No deadlock. Where all wait (exchange.cuh), no tile of collective k waits for packets: their senders push before they
// wait. So each rank has sent all its chunks of k that a tile of the other ranks waits for, since a tile sends all of
// them before it waits for the first; and the messages arrive, or the group ends.

inline constexpr uint32 kSlotsOfLane = 2;
inline constexpr uint64 kChunkBytes = 16 << 10;  // of a part that go by a lane

// One rank's view of what a collective exchanges with other nodes.
struct Outside {
  const device::BetweenWindow& window;
  const int* names;  // by node: the rank there that this one exchanges with
  uint32 lane;       // of the first chunk
  uint64 chunk;      // bytes of a part that go by a lane: a multiple of 16
};

// What a part's element takes in a message: as it is, if its rank is the only one of its node.
ARK_HOST_DEVICE constexpr uint64 wire_bytes(uint64 bytes, int places, uint64 element) {
  return device::between_padded(bytes) * (places == 1 ? 1 : sizeof(float) / element);
}

template <device::DType kType, device::ReduceOp kOp, int kPlaces, class Block>
class NodesSum {
 public:
  ARK_LOOP NodesSum(Block& block, const Exchanged& with, const Outside& outside, const void* in, void* out, uint64 part)
      : block_(block), with_(with), outside_(outside), in_(in), out_(out), part_(part) {}

  // Bytes [begin, end) of the part; both are multiples of the chunk, or the end. Returns whether the sum is there.
  ARK_LOOP bool run(uint64 begin, uint64 end) const {
    const uint64 first = begin / outside_.chunk, past = (end + outside_.chunk - 1) / outside_.chunk;
    push(begin, end);
    for (uint64 k = first; k < past; ++k)
      if (!send(k)) return false;
    for (uint64 k = first; k < past; ++k)
      if (!receive(k)) return false;
    return true;
  }

 private:
  using Unit = device::Unit;
  using Rule = decltype(rule_of<kType, kOp>());
  using Sum = typename Rule::Accumulator;
  static constexpr int kTogether = kPlaces < 4 ? kPlaces : 4;  // as many as registers hold
  static constexpr int kWire = kPlaces == 1 ? 1 : static_cast<int>(sizeof(Sum) / sizeof(Unit));  // units of a message

  ARK_LOOP const device::BetweenWindow& window() const { return outside_.window; }
  ARK_LOOP uint32 lane_of(uint64 k) const { return outside_.lane + static_cast<uint32>(k); }
  ARK_LOOP int other(int distance) const { return (window().node + distance) % window().nodes; }
  ARK_LOOP uint64& number_of(uint32 lane) const { return window().state[lane].pairs[window().node].sent; }
  ARK_LOOP char* packets(int owner, int source) const {
    return with_.packets[owner] + with_.place + source * protocol::packet_bytes(part_);
  }
  // Where a node's part is: its message, or what this rank has sent itself.
  ARK_LOOP Unit* slot_of(uint32 lane, int node, uint64 number) const {
    const uint64 outbox = node == window().node ? device::between_outbox(window()) : 0;
    return reinterpret_cast<Unit*>(window().memory + outbox + device::between_slot(window(), lane, node, number));
  }
  // Calls body(unit of the part, unit of the chunk), until it returns false.
  template <class Body>
  ARK_LOOP bool each_unit(uint64 k, Body&& body) const {
    const uint64 first = k * outside_.chunk / 16, past = first + chunk_bytes(k) / 16;
    ARK_ROLLED for (uint64 unit = first + block_.thread(); unit < past;
                    unit += Block::kThreads) if (!body(unit, unit - first)) return false;
    return true;
  }
  ARK_LOOP uint64 chunk_bytes(uint64 k) const {
    const uint64 left = part_ - k * outside_.chunk;
    return device::between_padded(left < outside_.chunk ? left : outside_.chunk);
  }

  ARK_LOOP void push(uint64 begin, uint64 end) const {
    if constexpr (kPlaces > 1) {
      for (uint64 unit = begin / 16 + block_.thread(); unit < (end + 15) / 16; unit += Block::kThreads) {
        const Unit value = block_.load(static_cast<const char*>(in_), unit, part_);
        ARK_UNROLL for (int d = 1; d < kPlaces; ++d) {
          const int peer = with_.rank + d < kPlaces ? with_.rank + d : with_.rank + d - kPlaces;
          protocol::store_unit_packets(packets(peer, with_.rank), unit, value.lo, value.hi, with_.epoch);
        }
      }
    }
  }

  // Returns false if the wait for a rank of the node was given up.
  ARK_LOOP bool sum_of_node(uint64 unit, Sum& sum) const {
    const Unit own = block_.load(static_cast<const char*>(in_), unit, part_);
    const auto slot = [&](int source) { return packets(with_.rank, source); };
    ARK_UNROLL for (int from = 0; from < kPlaces; from += kTogether) {
      Unit parts[kTogether];
      if (!take_packets<kPlaces, kTogether>(block_, slot, with_.rank, from, unit, own, with_.epoch, parts))
        return false;
      ARK_UNROLL for (int i = 0; i < kTogether; ++i) {
        if (from + i >= kPlaces) continue;
        if (from + i == 0)
          sum = Rule::first(parts[0]);
        else
          Rule::add(sum, parts[i]);
      }
    }
    return true;
  }

  ARK_LOOP bool send(uint64 k) const {
    const uint32 lane = lane_of(k);
    const uint64 number = number_of(lane), inbox = device::between_slot(window(), lane, window().node, number),
                 outbox = device::between_outbox(window()) + inbox;
    Unit* const to = slot_of(lane, window().node, number);
    const bool whole = each_unit(k, [&](uint64 unit, uint64 at) {
      if constexpr (kPlaces == 1) {
        to[at] = block_.load(static_cast<const char*>(in_), unit, part_);
      } else {
        Sum sum;
        if (!sum_of_node(unit, sum)) return false;
        ARK_UNROLL for (int i = 0; i < kWire; ++i) to[at * kWire + i] = packed(sum.lanes + 4 * i);
      }
      return true;
    });
    return block_.by_one(whole, [&] {
      for (int d = 1; d < window().nodes; ++d)
        if (!ask(protocol::Request::put_with_signal, lane, other(d), inbox, outbox, chunk_bytes(k) * kWire))
          return false;
      return true;
    });
  }

  ARK_LOOP bool receive(uint64 k) const {
    const uint32 lane = lane_of(k);
    const uint64 number = number_of(lane);
    const bool came = block_.by_one(true, [&] {
      for (int d = window().nodes - 1; d > 0; --d)
        if (!await(lane, other(d), number + 1)) return false;
      number_of(lane) = number + 1;
      return true;
    });
    if (!came) return false;
    return each_unit(k, [&](uint64 unit, uint64 at) {
      Sum sum;
      ARK_ROLLED for (int node = 0; node < window().nodes; ++node) {
        Sum part;
        if constexpr (kPlaces == 1) {
          part = Rule::first(node == window().node ? block_.load(static_cast<const char*>(in_), unit, part_)
                                                   : slot_of(lane, node, number)[at]);
        } else {
          const Unit* const from = slot_of(lane, node, number) + at * kWire;
          ARK_UNROLL for (int i = 0; i < kWire; ++i) unpack(from[i], part.lanes + 4 * i);
        }
        if (node == 0)
          sum = part;
        else
          Rule::merge(sum, part);
      }
      const bool average = kOp == device::ReduceOp::avg;
      block_.store(static_cast<char*>(out_), unit, part_, Rule::finish(sum, window().nodes * kPlaces, average));
      return true;
    });
  }

  static ARK_LOOP Unit packed(const float* four) {
    const auto pair = [](float low, float high) { return bits_as<uint32>(low) | uint64{bits_as<uint32>(high)} << 32; };
    return {pair(four[0], four[1]), pair(four[2], four[3])};
  }
  static ARK_LOOP void unpack(const Unit& unit, float* four) {
    four[0] = bits_as<float>(static_cast<uint32>(unit.lo)),
    four[1] = bits_as<float>(static_cast<uint32>(unit.lo >> 32));
    four[2] = bits_as<float>(static_cast<uint32>(unit.hi)),
    four[3] = bits_as<float>(static_cast<uint32>(unit.hi >> 32));
  }

  // One thread of the block. False: given up.
  ARK_LOOP bool ask(protocol::Request::Kind kind, uint32 lane, int node, uint64 to, uint64 from, uint64 bytes) const {
    device::BetweenLane& own = window().state[lane];
    protocol::RequestRing& ring = window().rings[lane];
    const uint64 number = own.head++;
    while (!protocol::has_room(ring, number, own.served))
      if (block_.over(device::outside_peer(outside_.names[node]), number)) return false;
    protocol::post(ring, number, {kind, static_cast<uint32>(node), to, from, bytes});
    return true;
  }
  // A write to a lost peer fails, which ends the group; a rank that has sent everything makes none but its probes.
  ARK_LOOP bool await(uint32 lane, int node, uint64 least) const {
    const uint64& count = window().heard[lane * window().nodes + node].chunks;
    while (protocol::load_acquire(count) < least) {
      if (block_.over(device::outside_peer(outside_.names[node]), least)) return false;
      if (block_.waits_long() && !ask(protocol::Request::probe, lane, node, 0, 0, 0)) return false;
    }
    return true;
  }

  Block& block_;
  const Exchanged& with_;
  const Outside& outside_;
  const void* const in_;
  void* const out_;
  const uint64 part_;
};

#if defined(__CUDACC__)

struct BlockBetween : BlockExchange {
  uint64 probed = 0;

  // True once for each time of kProbeAfter that passes.
  ARK_LOOP bool waits_long() {
    if (began == 0 || (turns & 255) != 0) return false;
    const uint64 now = now_ns();
    if (now - (began > probed ? began : probed) < device::kProbeAfter) return false;
    probed = now;
    return true;
  }
  // A barrier before and after what one thread does. Returns whether it is done; it is not if `holds` is false in any
  // thread, which has then given up.
  template <class Body>
  ARK_LOOP bool by_one(bool holds, Body&& body) {
    if (sync_any(!holds)) return false;
    bool given_up = false;
    if (loop::thread() == 0) {
      began = 0;
      given_up = !body();
    }
    return !sync_any(given_up);
  }
};

// `place`, `number` and `half`: as of exchange(). `lane`: a pointer whose distance from the first packets is the lane
// of the part's first chunk.
template <device::DType kType, device::ReduceOp kOp, int kPlaces>
ARK_LOOP void all_reduce_between(const Context& context, const void* in, void* out, const char* place,
                                 const char* number, const char* lane, uint64 half, uint64 chunk, uint64 part,
                                 uint64 begin, uint64 end) {
  const Worker& here = worker();
  const Ranks& ranks = here.head->ranks;
  const char* const first = ranks.packets[ranks.rank];
  const Exchanged with{ranks.packets, place - first + (here.step & 1) * half, ranks.rank,
                       uint64{here.step} << 32 | static_cast<uint64>(number - first)};
  const Outside outside{ranks.window, ranks.outside, static_cast<uint32>(lane - first), chunk};
  BlockBetween block{{context}};
  NodesSum<kType, kOp, kPlaces, BlockBetween>(block, with, outside, in, out, part).run(begin, end);
}

#endif

}  // namespace ark::loop
