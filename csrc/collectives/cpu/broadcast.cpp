// broadcast and scatter: root publishes and the others read. A broadcast costs root one copy for any number of ranks; a
// scatter's slot holds one piece per rank. Readers publish empty rounds to keep the numbering.
#include <algorithm>

#include "collectives/cpu/algorithms.hpp"

namespace ark {

void broadcast(Rounds& rounds, const Operation& operation, void* data, size_t bytes, int root, size_t chunk) {
  const size_t chunks = std::max<size_t>(1, (bytes + chunk - 1) / chunk);
  rounds.begin(operation, std::min(bytes, chunk));
  const uint64_t first = rounds.next();
  for (size_t k = 0; k < chunks; ++k) {
    std::byte* part = static_cast<std::byte*>(data) + k * chunk;
    const size_t length = std::min(chunk, bytes - k * chunk);
    if (rounds.rank() == root) {
      copy_bytes(rounds.open(first + k), part, length);
      rounds.publish(first + k);
    } else {
      rounds.pass(first + k);
      copy_out(part, rounds.read(first + k, root), length, bytes >= kStreamBytes);
    }
    if (k == 0) rounds.check_all(first);
    rounds.release(first + k);
  }
}

void scatter(Rounds& rounds, const Operation& operation, const void* const* ins, void* out, size_t bytes, int root,
             size_t chunk) {
  const int size = rounds.size(), rank = rounds.rank();
  const size_t piece = std::max<size_t>(kAlign, align_down(chunk / size));
  const size_t pieces = std::max<size_t>(1, (bytes + piece - 1) / piece);
  rounds.begin(operation, piece * size);
  const uint64_t first = rounds.next();
  for (size_t k = 0; k < pieces; ++k) {
    const size_t length = std::min(piece, bytes - k * piece);
    std::byte* target = static_cast<std::byte*>(out) + k * piece;
    if (rank == root) {
      std::byte* slot = rounds.open(first + k);
      for (int peer = 0; peer < size; ++peer) {
        if (peer != rank) copy_bytes(slot + peer * piece, static_cast<const std::byte*>(ins[peer]) + k * piece, length);
      }
      rounds.publish(first + k);
      const std::byte* own = static_cast<const std::byte*>(ins[rank]) + k * piece;
      if (own != target) copy_bytes(target, own, length);
    } else {
      rounds.pass(first + k);
      copy_out(target, rounds.read(first + k, root) + rank * piece, length, bytes >= kStreamBytes);
    }
    if (k == 0) rounds.check_all(first);
    rounds.release(first + k);
  }
}

}  // namespace ark
