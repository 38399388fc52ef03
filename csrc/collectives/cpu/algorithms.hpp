// The shared-memory algorithms, one per file. All use rounds (rounds.hpp), and every rank publishes and releases the
// same number of them. `chunk` is the payload of a round in bytes.
#pragma once

#include <functional>

#include "collectives/cpu/copy.hpp"
#include "collectives/cpu/reduce/reduce.hpp"
#include "collectives/cpu/rounds.hpp"

namespace ark {

inline constexpr size_t kAlign = 64;  // parts of a chunk start on cache lines
inline size_t align_up(size_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}
inline size_t align_down(size_t bytes) {
  return bytes / kAlign * kAlign;
}

// root -1: every rank gets the result (all_reduce). Otherwise only root does (reduce), and out is null elsewhere.
void one_shot_reduce(Rounds&, const Operation&, const void* in, void* out, size_t count, int root, size_t chunk);
void two_shot_reduce(Rounds&, const Operation&, const void* in, void* out, size_t count, int root, size_t chunk);
void reduce_scatter(Rounds&, const Operation&, const void* const* ins, void* out, size_t count, size_t chunk);
void all_gather(Rounds&, const Operation&, const void* in, void* const* outs, size_t bytes, size_t chunk);
// root: a rank within these rounds. operation.root is a rank of the group, of which these ranks may be a part.
void broadcast(Rounds&, const Operation&, void* data, size_t bytes, int root, size_t chunk);
void gather(Rounds&, const Operation&, const void* in, void* const* outs, size_t bytes, int root, size_t chunk);
void scatter(Rounds&, const Operation&, const void* const* ins, void* out, size_t bytes, int root, size_t chunk);
// Produce fills a slot with `bytes` for a peer, starting at offset `at`; Consume reads a peer's bytes from a slot.
using Produce = std::function<void(int peer, uint64_t at, size_t bytes, std::byte* slot)>;
using Consume = std::function<void(int peer, uint64_t at, size_t bytes, const std::byte* slot)>;
// all_to_all whose bytes are computed while they are sent, per peer from first to last, and consumed as they arrive.
// Both functions get multiples of `unit` bytes (at most unit_limit()) and are not called for this rank's own part.
// `sent` and `received` hold bytes per rank.
void exchange(Rounds&, const Operation&, const uint64_t* sent, const uint64_t* received, uint64_t unit, Produce produce,
              Consume consume, size_t chunk);
inline uint64_t unit_limit(int size, size_t chunk) {
  return std::max<size_t>(kAlign, align_down(chunk / size));
}
void all_to_all(Rounds&, const Operation&, const Bytes* ins, const MutableBytes* outs, size_t chunk);
void barrier(Rounds&, const Operation&);
// `number` counts the group's monitored barriers from 1.
void monitored_barrier(GroupHealth&, uint64_t number, const OperationContext&, bool wait_all);

// Reads every rank's premul_sum factor from the operation's first round; returns null for other operations.
const double* gather_factors(const Rounds& rounds, const Operation& operation, uint64_t first_round,
                             std::vector<double>& storage);

}  // namespace ark
