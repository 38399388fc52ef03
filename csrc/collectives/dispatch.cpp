// The default table and the lookup. Sizes and chunks were measured on an idle two-core machine; `ark tune` measures
// them for another machine.
#include "collectives/dispatch.hpp"

#include <limits>

#include "util/error.hpp"

namespace ark {

namespace {

constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();
constexpr uint32_t kAnyRanks = std::numeric_limits<uint32_t>::max();
constexpr uint32_t kKiB = 1024;
constexpr uint8_t kCorePerRank = 0, kOversubscribed = 1, kBoth = 2;

}  // namespace

const char* name_of(Algorithm algorithm) {
  return algorithm == Algorithm::one_shot ? "one_shot" : "two_shot";
}

std::vector<Rule> DispatchTable::defaults() {
  std::vector<Rule> rules;
  auto add = [&](Kind kind, Algorithm algorithm, uint8_t when, uint32_t ranks, uint64_t bytes, uint32_t chunk) {
    rules.push_back(Rule{kind, algorithm, when, 0, ranks, bytes, chunk, 0});
  };
  // Two ranks with a core each read each other's whole chunk. That moves as many bytes through shared memory as two
  // shots with half the hand-overs, and the own chunk is still in the core's cache. A quarter of that cache (1 MiB) was
  // the best chunk size.
  for (Kind kind : {Kind::all_reduce, Kind::reduce}) {
    add(kind, Algorithm::one_shot, kCorePerRank, 2, kAny, 256 * kKiB);
    add(kind, Algorithm::one_shot, kCorePerRank, kAnyRanks, 4 * kKiB, 4 * kKiB);
    add(kind, Algorithm::two_shot, kCorePerRank, kAnyRanks, kAny, 512 * kKiB);
    add(kind, Algorithm::one_shot, kOversubscribed, kAnyRanks, 16 * kKiB, 16 * kKiB);
    add(kind, Algorithm::two_shot, kOversubscribed, kAnyRanks, kAny, 512 * kKiB);
  }
  for (int kind = 0; kind < kKinds; ++kind) {
    const Kind k = static_cast<Kind>(kind);
    if (k == Kind::all_reduce || k == Kind::reduce) continue;
    add(k, Algorithm::one_shot, kCorePerRank, kAnyRanks, kAny, (k == Kind::broadcast ? 512 : 256) * kKiB);
    add(k, Algorithm::one_shot, kOversubscribed, kAnyRanks, kAny, 512 * kKiB);
  }
  return rules;
}

DispatchTable::DispatchTable(std::vector<Rule> rules) : rules_(std::move(rules)) {
  auto refuse = [](size_t index, const std::string& why) {
    throw Error(ErrorKind::invalid_argument, "dispatch table, rule " + std::to_string(index) + ": " + why,
                ErrorContext{-1, -1, {}, 0, "Mend the table, or unset ARK_DISPATCH to use the measured defaults."});
  };
  if (rules_.size() > kMaxRules) refuse(kMaxRules, "more than " + std::to_string(kMaxRules) + " rules");
  for (size_t i = 0; i < rules_.size(); ++i) {
    const Rule& rule = rules_[i];
    if (static_cast<int>(rule.kind) >= kKinds) refuse(i, "unknown collective");
    if (static_cast<int>(rule.algorithm) >= kAlgorithms) refuse(i, "unknown algorithm");
    if (rule.chunk_bytes < 64 || rule.chunk_bytes > kMaxChunkBytes || rule.chunk_bytes % 64 != 0) {
      refuse(i, "chunk_bytes " + std::to_string(rule.chunk_bytes) + " is not a multiple of 64 from 64 to " +
                    std::to_string(kMaxChunkBytes));
    }
    const bool reduces = rule.kind == Kind::all_reduce || rule.kind == Kind::reduce;
    if (rule.algorithm == Algorithm::two_shot && !reduces) refuse(i, "two_shot is for all_reduce and reduce");
  }
}

Choice DispatchTable::choose(Kind kind, size_t bytes, int ranks, int cores) const {
  const uint8_t when = ranks > cores ? kOversubscribed : kCorePerRank;
  for (const Rule& rule : rules_) {
    if (rule.kind == kind && bytes <= rule.max_bytes && static_cast<uint32_t>(ranks) <= rule.max_ranks &&
        (rule.oversubscribed == when || rule.oversubscribed == kBoth)) {
      return {rule.algorithm, rule.chunk_bytes};
    }
  }
  const bool reduces = kind == Kind::all_reduce || kind == Kind::reduce;
  return {reduces ? Algorithm::two_shot : Algorithm::one_shot, 256 * kKiB};
}

}  // namespace ark
