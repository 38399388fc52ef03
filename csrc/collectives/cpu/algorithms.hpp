// The shared-memory algorithms, one file each. All are written in rounds (rounds.hpp) and end with every rank having
// published and released the same number of them. `chunk` is the payload of a round in bytes.
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

// root -1: everybody receives the result (all_reduce); else root alone does (reduce), and out is null elsewhere.
void one_shot_reduce(Rounds&, const Operation&, const void* in, void* out, size_t count, int root, size_t chunk);
void two_shot_reduce(Rounds&, const Operation&, const void* in, void* out, size_t count, int root, size_t chunk);
void reduce_scatter(Rounds&, const Operation&, const void* const* ins, void* out, size_t count, size_t chunk);
void all_gather(Rounds&, const Operation&, const void* in, void* const* outs, size_t bytes, size_t chunk);
// root: a rank of these rounds; the operation's is one of the group, of which they may be a part.
void broadcast(Rounds&, const Operation&, void* data, size_t bytes, int root, size_t chunk);
void gather(Rounds&, const Operation&, const void* in, void* const* outs, size_t bytes, int root, size_t chunk);
void scatter(Rounds&, const Operation&, const void* const* ins, void* out, size_t bytes, int root, size_t chunk);
// Puts `bytes` of what this rank has for a peer, from `at` on, into a slot; takes those of a peer from one.
using Produce = std::function<void(int peer, uint64_t at, size_t bytes, std::byte* slot)>;
using Consume = std::function<void(int peer, uint64_t at, size_t bytes, const std::byte* slot)>;
// all_to_all whose bytes are computed as they are sent, peer by peer from the first byte to the last, and put where
// they belong as they come. Both are called with multiples of `unit` bytes (at most unit_limit()), and not for this
// rank's own part. Sizes are in bytes, one a rank.
void exchange(Rounds&, const Operation&, const uint64_t* sent, const uint64_t* received, uint64_t unit, Produce produce,
              Consume consume, size_t chunk);
inline uint64_t unit_limit(int size, size_t chunk) {
  return std::max<size_t>(kAlign, align_down(chunk / size));
}
void all_to_all(Rounds&, const Operation&, const Bytes* ins, const MutableBytes* outs, size_t chunk);
void barrier(Rounds&, const Operation&);
// `number` counts these barriers of the group, from 1.
void monitored_barrier(GroupHealth&, uint64_t number, const OperationContext&, bool wait_all);

// The per-rank multipliers of a premul_sum, read from the operation's first round; null for other operations.
const double* gather_factors(const Rounds& rounds, const Operation& operation, uint64_t first_round,
                             std::vector<double>& storage);

}  // namespace ark
