// Thresholds between one hop and many. Small tensors save hops, large ones overlap their stages.
#include "collectives/carried_path.hpp"

#include <algorithm>

#include "collectives/cpu/algorithms.hpp"
#include "collectives/dispatch.hpp"

namespace ark {

namespace {

// Partials go whole to every rank that needs them, if they times the number of ranks take at most this many bytes.
constexpr size_t kWhole = 64 << 10;
// Partials go whole to a root, if they times the number of nodes take at most this many bytes.
constexpr size_t kWholeToRoot = 4 << 20;
constexpr size_t kSumChunk = 1 << 20;     // of a large sum
constexpr size_t kGatherRound = 1 << 20;  // of all pieces of an all_gather in a round
static_assert(kSumChunk <= kMaxChunkBytes && kGatherRound <= kMaxChunkBytes);

CarriedPath in_pieces(size_t bytes, size_t piece) {
  return {CarriedWay::pieces, piece, std::max<size_t>(1, (bytes + piece - 1) / piece)};
}

}  // namespace

const char* name_of(CarriedWay way) {
  switch (way) {
    case CarriedWay::first: return "first";
    case CarriedWay::whole: return "whole";
    case CarriedWay::pieces: return "pieces";
    case CarriedWay::blocks: return "blocks";
    case CarriedWay::parcels: return "parcels";
  }
  return "unknown";
}

CarriedPath carried_path(Kind kind, size_t bytes, size_t element, size_t partial, const NodePlan& plan) {
  const size_t ranks = plan.ranks(), partials = bytes / element * partial;
  const bool in_first = bytes <= kFirstRoom;
  const auto one = [bytes](CarriedWay way) { return CarriedPath{way, std::max<size_t>(1, bytes), 1}; };
  const auto in_one_hop = [&] { return one(partials <= kFirstRoom ? CarriedWay::first : CarriedWay::whole); };
  switch (kind) {
    case Kind::all_reduce:
      if (partials * ranks <= kWhole || ranks == 1) return in_one_hop();
      return in_pieces(bytes, kSumChunk / element * element);
    case Kind::reduce:
      if (partials <= kMaxChunkBytes && partials * plan.nodes() <= kWholeToRoot) return in_one_hop();
      return in_pieces(bytes, kSumChunk / element * element);
    case Kind::reduce_scatter: {
      const size_t most = (plan.flat() ? kSumChunk : kSumChunk / ranks) / element * element;
      CarriedPath path = in_pieces(bytes, std::max(element, std::min(most, bytes)));
      if (partials <= kFirstRoom && bytes * ranks <= kSumChunk) path.way = CarriedWay::first;
      return path;
    }
    case Kind::all_gather: {
      if (bytes * plan.most_in_node() <= kFirstRoom) return one(CarriedWay::first);
      const size_t most = align_down(kGatherRound / plan.most_stood_for());
      return in_pieces(bytes, std::min(bytes, std::clamp<size_t>(most, kAlign, kMostPiece)));
    }
    case Kind::broadcast:
      if (in_first) return one(CarriedWay::first);
      return in_pieces(bytes, std::min(bytes, kMostPiece));
    case Kind::gather:
      if (plan.gathers_parcels(bytes, kFirstRoom)) return one(CarriedWay::parcels);
      return one(in_first ? CarriedWay::first : CarriedWay::blocks);
    case Kind::scatter:
      if (plan.scatters_parcels() && bytes <= plan.parcel_limit()) return one(CarriedWay::parcels);
      return one(in_first ? CarriedWay::first : CarriedWay::blocks);
    case Kind::all_to_all:
      if (plan.parcel_limit() > 0) return one(CarriedWay::parcels);
      return one(in_first ? CarriedWay::first : CarriedWay::blocks);
    case Kind::barrier: return one(CarriedWay::first);
  }
  return one(CarriedWay::whole);
}

}  // namespace ark
