// Compares the routing of tokens to experts with a plain sort.
#include "ops/moe_routing.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>

namespace ark::ops {
namespace {

TEST(MoeRouting, SortsByExpertThenRankThenChoice) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const int ranks = 1 + static_cast<int>(random() % 4);
    const int64_t local = 1 + random() % 4, experts = ranks * local;
    std::vector<std::vector<int64_t>> chosen(ranks);
    std::vector<int64_t> counts(ranks * experts);
    for (int r = 0; r < ranks; ++r) {
      chosen[r].resize(random() % 20);
      for (int64_t& expert : chosen[r]) {
        expert = static_cast<int64_t>(random() % (experts + 1)) - 1;
        if (expert >= 0) ++counts[r * experts + expert];
      }
    }
    const MoeRouting routing(ranks, experts, counts);
    // Every choice with a destination, in the order of rows on its expert's rank.
    std::vector<std::tuple<int64_t, int, int64_t>> all;
    for (int r = 0; r < ranks; ++r)
      for (size_t i = 0; i < chosen[r].size(); ++i)
        if (chosen[r][i] >= 0) all.emplace_back(chosen[r][i], r, i);
    std::sort(all.begin(), all.end());
    std::vector<int64_t> next(ranks);
    std::vector<std::vector<int64_t>> row(ranks), slot(ranks);
    for (int r = 0; r < ranks; ++r) {
      row[r].resize(chosen[r].size()), slot[r].resize(chosen[r].size());
      routing.place(r, chosen[r].data(), static_cast<int64_t>(chosen[r].size()), row[r].data(), slot[r].data());
      EXPECT_EQ(routing.choices(r), std::count_if(chosen[r].begin(), chosen[r].end(), [](auto e) { return e >= 0; }));
    }
    std::vector<std::vector<int64_t>> slots_in_order(ranks);
    for (const auto& [expert, rank, choice] : all) {
      EXPECT_EQ(row[rank][choice], next[routing.owner(expert)]++);
      slots_in_order[rank].push_back(slot[rank][choice]);
      // The expert's rank must find the same row.
      const int owner = routing.owner(expert);
      const auto theirs = routing.rows_of(rank, owner);
      EXPECT_EQ(theirs.at(slot[rank][choice] - routing.first_slot_of(rank, owner)), row[rank][choice]);
    }
    for (int r = 0; r < ranks; ++r) {
      EXPECT_EQ(routing.rows(r), next[r]);
      for (size_t i = 0; i < slots_in_order[r].size(); ++i) EXPECT_EQ(slots_in_order[r][i], static_cast<int64_t>(i));
      for (size_t i = 0; i < chosen[r].size(); ++i) EXPECT_EQ(row[r][i] < 0, chosen[r][i] < 0);
    }
  }
}

}  // namespace
}  // namespace ark::ops
