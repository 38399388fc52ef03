// Tests the dispatch table: every collective has a choice at every size, and bad tables are refused, rule by rule.
#include "collectives/dispatch.hpp"

#include <gtest/gtest.h>

#include "util/error.hpp"

namespace ark {
namespace {

TEST(Dispatch, DefaultsCoverEverything) {
  const DispatchTable table;
  for (int kind = 0; kind < kKinds; ++kind) {
    for (int ranks : {1, 2, 3, 8, 64, 1000}) {
      for (int cores : {1, 2, 64}) {
        for (size_t bytes = 1; bytes < (size_t{1} << 40); bytes = bytes * 3 + 1) {
          const Choice choice = table.choose(static_cast<Kind>(kind), bytes, ranks, cores);
          EXPECT_GE(choice.chunk_bytes, 64u);
          EXPECT_LE(choice.chunk_bytes, kMaxChunkBytes);
          const bool reduces = static_cast<Kind>(kind) == Kind::all_reduce || static_cast<Kind>(kind) == Kind::reduce;
          // Every reader reads every input, so with more than two ranks this is only for small tensors.
          if (reduces && ranks > 2 && bytes > 64 * 1024) {
            EXPECT_EQ(choice.algorithm, Algorithm::two_shot);
          }
        }
      }
    }
  }
}

TEST(Dispatch, TheFirstMatchingRuleDecides) {
  const DispatchTable table({{Kind::all_reduce, Algorithm::one_shot, 0, 0, 4, 1024, 1024, 0},
                             {Kind::all_reduce, Algorithm::two_shot, 1, 0, 8, 4096, 128, 0},
                             {Kind::all_reduce, Algorithm::two_shot, 2, 0, 8, 4096, 192, 0}});
  EXPECT_EQ(table.choose(Kind::all_reduce, 1024, 4, 4).algorithm, Algorithm::one_shot);
  EXPECT_EQ(table.choose(Kind::all_reduce, 1025, 4, 4).chunk_bytes, 192u);
  EXPECT_EQ(table.choose(Kind::all_reduce, 1000, 4, 3).chunk_bytes, 128u);
  EXPECT_EQ(table.choose(Kind::all_reduce, 5000, 4, 3).algorithm, Algorithm::two_shot);  // no rule: a safe default
}

TEST(Dispatch, BadRulesAreRefusedByNumber) {
  const Rule good{Kind::all_reduce, Algorithm::two_shot, 2, 0, 8, 4096, 128, 0};
  auto refused = [&](Rule bad) {
    try {
      DispatchTable({good, bad});
    } catch (const Error& error) {
      return error.kind() == ErrorKind::invalid_argument &&
             std::string(error.what()).find("rule 1") != std::string::npos;
    }
    return false;
  };
  EXPECT_TRUE(refused({Kind::all_reduce, Algorithm::two_shot, 2, 0, 8, 4096, 100, 0}));
  EXPECT_TRUE(refused({Kind::all_reduce, Algorithm::two_shot, 2, 0, 8, 4096, 1u << 21, 0}));
  EXPECT_TRUE(refused({Kind::broadcast, Algorithm::two_shot, 2, 0, 8, 4096, 2048, 0}));
  EXPECT_TRUE(refused({static_cast<Kind>(77), Algorithm::two_shot, 2, 0, 8, 4096, 2048, 0}));
  EXPECT_TRUE(refused({Kind::reduce, static_cast<Algorithm>(9), 2, 0, 8, 4096, 2048, 0}));
  EXPECT_THROW(DispatchTable(std::vector<Rule>(kMaxRules + 1, good)), Error);
}

}  // namespace
}  // namespace ark
