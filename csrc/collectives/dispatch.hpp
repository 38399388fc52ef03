// Chooses the algorithm of a collective by measurement: (kind, bytes, ranks, cores) -> algorithm and chunk.
//
// A table is a list of rules; the first match decides. The defaults were measured (dispatch.cpp); a tuned table
// replaces them (ARK_DISPATCH, written by tools.tune). All ranks use rank 0's table and the number of cores that the
// group's ranks share, so they decide the same way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/operation.hpp"

namespace ark {

enum class Algorithm : uint8_t {
  one_shot = 0,  // every rank reads all it needs from its peers, one round per chunk
  two_shot = 1,  // reduce-scatter, then all-gather, in pipelined chunks
};
inline constexpr int kAlgorithms = 2;
const char* name_of(Algorithm algorithm);

struct Choice {
  Algorithm algorithm;
  uint32_t chunk_bytes;  // payload of a round
};

// A fixed-size record, because the table is stored in rank 0's segment.
struct Rule {
  Kind kind;
  Algorithm algorithm;
  uint8_t oversubscribed;  // 0: applies with a core for every rank, 1: with fewer cores than ranks, 2: both
  uint8_t reserved = 0;
  uint32_t max_ranks;    // applies up to this many ranks
  uint64_t max_bytes;    // ... and this many bytes per rank
  uint32_t chunk_bytes;  // multiple of 64
  uint32_t reserved2 = 0;
};
static_assert(sizeof(Rule) == 24);

inline constexpr size_t kMaxRules = 128;
inline constexpr size_t kMaxChunkBytes = size_t{1} << 20;

class DispatchTable {
 public:
  DispatchTable() : DispatchTable(defaults()) {}
  explicit DispatchTable(std::vector<Rule> rules);  // validates; throws Error(invalid_argument) naming the rule
  static std::vector<Rule> defaults();

  // `bytes`: one rank's contribution (all_gather, broadcast: the same; reduce_scatter: what one rank receives).
  Choice choose(Kind kind, size_t bytes, int ranks, int cores) const;
  const std::vector<Rule>& rules() const { return rules_; }

 private:
  std::vector<Rule> rules_;
};

}  // namespace ark
