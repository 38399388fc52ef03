// all_gather and gather: every rank publishes its input in chunks, and readers copy them straight to their place.
// Outputs are written in rank order, so outputs that alias one buffer end with the last rank's data.
#include <algorithm>

#include "collectives/cpu/algorithms.hpp"

namespace ark {

namespace {

void gather_chunks(Rounds& rounds, const Operation& operation, const void* in, void* const* outs, size_t bytes,
                   size_t chunk, int root) {
  const int size = rounds.size(), rank = rounds.rank();
  const bool receives = root < 0 || root == rank;
  const size_t chunks = std::max<size_t>(1, (bytes + chunk - 1) / chunk);
  rounds.begin(operation, std::min(bytes, chunk));
  const uint64_t first = rounds.next();
  const bool stream = bytes * size >= kStreamBytes;
  auto length = [&](size_t k) { return std::min(chunk, bytes - k * chunk); };
  auto publish = [&](size_t k) {
    // Root needs no slot for its own input to a gather.
    const bool speaks = root != rank;
    if (!speaks) return rounds.pass(first + k);
    copy_bytes(rounds.open(first + k), static_cast<const std::byte*>(in) + k * chunk, length(k));
    rounds.publish(first + k);
  };
  publish(0);
  for (size_t k = 0; k < chunks; ++k) {
    if (k + 1 < chunks) publish(k + 1);
    for (int peer = 0; receives && peer < size; ++peer) {
      std::byte* target = static_cast<std::byte*>(outs[peer]) + k * chunk;
      const std::byte* source =
          peer == rank ? static_cast<const std::byte*>(in) + k * chunk : rounds.read(first + k, peer);
      if (source != target) copy_out(target, source, length(k), stream);
    }
    if (!receives && k == 0) rounds.check_all(first);
    rounds.release(first + k);
  }
}

}  // namespace

void all_gather(Rounds& rounds, const Operation& operation, const void* in, void* const* outs, size_t bytes,
                size_t chunk) {
  gather_chunks(rounds, operation, in, outs, bytes, chunk, -1);
}

void gather(Rounds& rounds, const Operation& operation, const void* in, void* const* outs, size_t bytes, int root,
            size_t chunk) {
  gather_chunks(rounds, operation, in, outs, bytes, chunk, root);
}

}  // namespace ark
