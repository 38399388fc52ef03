// reduce_scatter: in each round a rank publishes one piece per peer, and adds all ranks' pieces for itself in rank
// order, straight into the output. Every element except the rank's own part crosses shared memory once.
#include <algorithm>

#include "collectives/cpu/algorithms.hpp"

namespace ark {

void reduce_scatter(Rounds& rounds, const Operation& operation, const void* const* ins, void* out, size_t count,
                    size_t chunk) {
  const int size = rounds.size(), rank = rounds.rank();
  const size_t element = size_of(operation.descriptor.dtype);
  const size_t piece = std::max<size_t>(kAlign, align_down(chunk / size));  // bytes per peer and round
  const size_t piece_count = piece / element;
  const size_t pieces = std::max<size_t>(1, (count + piece_count - 1) / piece_count);
  rounds.begin(operation, piece * size);
  const uint64_t first = rounds.next();
  const ReduceFn reduce = find_reduce(operation.descriptor.dtype, operation.descriptor.op);
  auto elements = [&](size_t k) { return std::min(piece_count, count - k * piece_count); };
  auto publish = [&](size_t k) {
    std::byte* slot = rounds.open(first + k);
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      copy_bytes(slot + peer * piece, static_cast<const std::byte*>(ins[peer]) + k * piece_count * element,
                 elements(k) * element);
    }
    rounds.publish(first + k);
  };
  std::vector<const void*> sources(size);
  std::vector<double> storage;
  const double* factors = nullptr;
  publish(0);
  for (size_t k = 0; k < pieces; ++k) {
    if (k + 1 < pieces) publish(k + 1);
    const size_t offset = k * piece_count * element;
    for (int peer = 0; peer < size; ++peer) {
      sources[peer] = peer == rank ? static_cast<const std::byte*>(ins[rank]) + offset
                                   : rounds.read(first + k, peer) + rank * piece;
    }
    if (k == 0) factors = gather_factors(rounds, operation, first, storage);
    reduce(static_cast<std::byte*>(out) + offset, nullptr, sources.data(), size, elements(k), factors);
    rounds.release(first + k);
  }
}

}  // namespace ark
