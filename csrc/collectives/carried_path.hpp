// The way that a collective over several nodes takes, by its size: within first messages, whole in one hop, or in
// pieces that are pipelined. Pure arithmetic, equal on all ranks; the simulator (ark_torch/simulation) asks it as well.
#pragma once

#include <cstddef>
#include <cstdint>

#include "collectives/node_plan.hpp"
#include "collectives/operation.hpp"

namespace ark {

// Of a first message (carried_communicator.hpp), and of the data that it can hold.
inline constexpr size_t kFirstMessage = 1024, kFirstRoom = 968;
// Steps between two stages of a chunk of a sum.
inline constexpr size_t kSumLag = 1;
// Rounds between a gathered piece's message and the round that publishes it.
inline constexpr size_t kPiecesAhead = 2;
// Bytes of a message, and of a round in a node, of collectives that only move bytes.
inline constexpr size_t kMostPiece = 512 << 10;

enum class CarriedWay : uint8_t {
  first,    // with the first messages
  whole,    // in one hop, after the first messages
  pieces,   // `pieces` messages of at most `piece` bytes for every peer, pipelined with the node's rounds
  blocks,   // a message for every rank of other nodes
  parcels,  // small blocks for a node in one message (carried_parcels.cpp)
};
inline constexpr int kCarriedWays = 5;
const char* name_of(CarriedWay way);

struct CarriedPath {
  CarriedWay way;
  size_t piece;  // bytes of a rank's tensor, as counted by `bytes`
  size_t pieces;
};

// bytes: of a rank's tensor (reduce_scatter: of its output; all_gather, gather: of its input; scatter: of its output;
// all_to_all: of a block). element: bytes of an element; partial: bytes of an element's partial sum.
CarriedPath carried_path(Kind kind, size_t bytes, size_t element, size_t partial, const NodePlan& plan);

}  // namespace ark
