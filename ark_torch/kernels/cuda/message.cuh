// One message between two ranks, or within one: the loops of one warp of a lane. Each piece is loaded (or requested)
// before the previous one is stored (or awaited), so that a warp always has two in flight.
#pragma once

#include "cuda/chunks.cuh"
#include "cuda/landing.cuh"
#include "cuda/lines.cuh"

namespace ark::device {

#if defined(__CUDACC__)

template <class Protocol, int kRows>
__device__ __forceinline__ void load_piece(const void* from, uint64 bytes, const Piece<Protocol, kRows>& piece,
                                           Unit (&units)[kRows]) {
  const bool aligned = (reinterpret_cast<uint64>(from) & 15) == 0;
  ARK_UNROLL
  for (int j = 0; j < kRows; j++) {
    const uint64 unit = Protocol::unit_of(piece.row + j);
    units[j] = Unit{0, 0};
    if (j < piece.rows && Protocol::owns_unit() && unit * 16 < bytes) units[j] = load_unit(from, unit, bytes, aligned);
  }
}

template <class Protocol, int kRows>
__device__ __forceinline__ void store_piece(void* to, uint64 bytes, const Piece<Protocol, kRows>& piece,
                                            const Unit (&units)[kRows]) {
  const bool aligned = (reinterpret_cast<uint64>(to) & 15) == 0;
  ARK_UNROLL
  for (int j = 0; j < kRows; j++) {
    const uint64 unit = Protocol::unit_of(piece.row + j);
    if (j < piece.rows && Protocol::owns_unit() && unit * 16 < bytes) store_unit(to, unit, bytes, aligned, units[j]);
  }
}

inline constexpr int kMessageRows = 4;  // per piece

template <class Protocol>
__device__ __forceinline__ void send_message(const Rings& rings, uint32 lane, int peer, const void* from,
                                             uint64 bytes) {
  const RingTable& table = Protocol::table(rings);
  const Spread spread = spread_of<Protocol>(bytes, Protocol::most_lanes(rings));
  Piece<Protocol, kMessageRows> piece;
  piece.find(spread, lane, bytes);
  if (!piece.there) return;
  typename Protocol::Sender sender;
  sender.open(rings, table, lane, peer);
  Unit units[kMessageRows], next_units[kMessageRows];
  load_piece(from, bytes, piece, next_units);
  while (piece.there) {
    const auto next = piece.after(spread, lane, bytes);
    ARK_UNROLL
    for (int j = 0; j < kMessageRows; j++) units[j] = next_units[j];
    if (next.there) load_piece(from, bytes, next, next_units);
    if (!sender.put(piece, units)) return;
    if (!next.there || next.step != piece.step) sender.end_step();
    piece = next;
  }
  sender.close();
}

struct NobodyAsks {
  __device__ __forceinline__ void operator()(uint64) const {}
};

// The whole warp calls `stored(step)` when a step has been stored in `to`.
template <class Protocol, class Stored = NobodyAsks>
__device__ __forceinline__ void receive_message(const Rings& rings, uint32 lane, int peer, void* to, uint64 bytes,
                                                Stored stored = {}) {
  const RingTable& table = Protocol::table(rings);
  const Spread spread = spread_of<Protocol>(bytes, Protocol::most_lanes(rings));
  Piece<Protocol, kMessageRows> piece;
  piece.find(spread, lane, bytes);
  if (!piece.there) return;
  typename Protocol::Receiver receiver;
  receiver.open(rings, table, lane, peer);
  Unit raw[kMessageRows], next_raw[kMessageRows];
  bool asked = receiver.ask(piece, 0, next_raw);
  while (piece.there) {
    const auto next = piece.after(spread, lane, bytes);
    bool loaded = asked;
    ARK_UNROLL
    for (int j = 0; j < kMessageRows; j++) raw[j] = next_raw[j];
    if (next.there) asked = receiver.ask(next, static_cast<int>(next.step - piece.step), next_raw);
    while (!receiver.arrived(piece, loaded, raw)) {
      if (receiver.over(peer)) return;
      loaded = receiver.ask(piece, 0, raw);
    }
    ARK_UNROLL
    for (int j = 0; j < kMessageRows; j++) raw[j] = Protocol::Receiver::unpacked(raw[j]);
    const bool ends = !next.there || next.step != piece.step;
    if (ends) receiver.release();
    store_piece(to, bytes, piece, raw);
    if (ends) stored(piece.step);
    piece = next;
  }
  receiver.close();
}

// The lanes that take part in an announced message: it may be spread over lanes by Protocol or by Direct.
template <class Protocol, class Direct>
__device__ __forceinline__ uint32 landing_lanes(const Rings& rings, uint64 bytes) {
  const uint32 by_ring = spread_of<Protocol>(bytes, Protocol::most_lanes(rings)).lanes,
               direct = spread_of<Direct>(bytes, Direct::most_lanes(rings)).lanes;
  return by_ring > direct ? by_ring : direct;
}

// As receive_message, but in message sizes that are announced, the sender may store the whole message itself.
template <class Protocol, class Direct>
__device__ __forceinline__ void receive_landing(const Rings& rings, uint32 lane, int peer, void* to, uint64 bytes) {
  if (bytes >= rings.landings_from) {
    if (lane >= landing_lanes<Protocol, Direct>(rings, bytes)) return;
    Landing landing;
    landing.open(rings, lane, peer);
    landing.announce(rings.landing[peer]);
    // Lanes that the ring does not use wait for the answer too, so that no announcement is overwritten unread.
    if (rings.landing[peer] != nullptr || lane >= spread_of<Protocol>(bytes, Protocol::most_lanes(rings)).lanes) {
      landing.await_all();
      return;
    }
  }
  receive_message<Protocol>(rings, lane, peer, to, bytes);
}

// Copies bytes to memory that this rank reaches: its own, or a peer's.
template <class Protocol>
__device__ __forceinline__ void copy_message(const Rings& rings, uint32 lane, void* to, const void* from,
                                             uint64 bytes) {
  if (to == from) return;
  const Spread spread = spread_of<Protocol>(bytes, Protocol::most_lanes(rings));
  Piece<Protocol, kMessageRows> piece;
  piece.find(spread, lane, bytes);
  if (!piece.there) return;
  Unit units[kMessageRows], next_units[kMessageRows];
  load_piece(from, bytes, piece, next_units);
  while (piece.there) {
    const auto next = piece.after(spread, lane, bytes);
    ARK_UNROLL
    for (int j = 0; j < kMessageRows; j++) units[j] = next_units[j];
    if (next.there) load_piece(from, bytes, next, next_units);
    store_piece(to, bytes, piece, units);
    piece = next;
  }
}

// As send_message, with announcements as above.
template <class Protocol, class Direct>
__device__ __forceinline__ void send_landing(const Rings& rings, uint32 lane, int peer, const void* from,
                                             uint64 bytes) {
  if (bytes >= rings.landings_from) {
    if (lane >= landing_lanes<Protocol, Direct>(rings, bytes)) return;
    Landing landing;
    char* to = nullptr;
    landing.open(rings, lane, peer);
    if (!landing.await_address(to)) return;
    if (to != nullptr || lane >= spread_of<Protocol>(bytes, Protocol::most_lanes(rings)).lanes) {
      if (to != nullptr) copy_message<Direct>(rings, lane, to, from, bytes);
      landing.tell_done();
      return;
    }
  }
  send_message<Protocol>(rings, lane, peer, from, bytes);
}

#endif

}  // namespace ark::device
