// Takes the tasks of one-kernel mixtures of experts in order: each tile once, and none before those that it reads.
#include "cuda/fused/moe_tasks.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

namespace ark::device {
namespace {

constexpr uint32 kRows = 64;

struct Routed {
  std::vector<uint32> starts;
  MoeTaskShape shape;

  Routed(const std::vector<uint32>& rows, uint32 first, uint32 second, uint32 blocks, uint32 base) {
    starts.push_back(base);
    for (const uint32 of : rows) starts.push_back(starts.back() + of);
    shape = {starts.data(), base, static_cast<uint32>(rows.size()), {first, second}, {32, 128}, blocks};
  }
};

// Takes all tasks; returns how many of the second product precede the last of the first.
uint32 take_all(const Routed& routed, const std::vector<uint32>& rows) {
  MoeTasks<kRows> tasks(routed.shape);
  std::map<std::tuple<uint32, uint32>, uint32> made;  // columns of the first product, by expert and row
  std::set<std::tuple<uint32, uint32, uint32, uint32>> seen;
  std::map<uint32, std::tuple<uint32, uint32>> groups;
  std::vector<uint32> covered(rows.size());
  uint32 seconds = 0, early = 0;
  MoeTask task{};
  uint32 number = 0;
  for (; tasks.find(number, task); ++number) {
    EXPECT_TRUE(seen.emplace(task.kind, task.expert, task.down, task.column).second) << number;
    EXPECT_LT(task.down, rows.at(task.expert));
    EXPECT_EQ(task.rows, std::min(kRows, rows[task.expert] - task.down));
    EXPECT_EQ(task.row, routed.starts[task.expert] - routed.shape.base + task.down);
    EXPECT_EQ(task.column % routed.shape.columns[task.kind - 1], 0u);
    const auto group = std::make_tuple(task.expert, task.down);
    EXPECT_EQ(groups.emplace(task.group, group).first->second, group) << "two groups of rows have one number";
    EXPECT_LE(task.group, routed.starts.back() / kRows + rows.size());
    if (task.kind == MoeTask::first) {
      ++made[group], early = seconds;
      if (task.column == 0) covered[task.expert] += task.rows;
    } else {
      EXPECT_EQ(made[group], routed.shape.tiles[0]) << "the second product comes before what it reads";
      ++seconds;
    }
  }
  EXPECT_EQ(number, tasks.count());
  EXPECT_EQ(covered, rows);
  EXPECT_EQ(seen.size(), groups.size() * (routed.shape.tiles[0] + routed.shape.tiles[1]));
  return early;
}

TEST(MoeTasks, EachTileOnceAndAfterWhatItReads) {
  std::mt19937 random(5);
  for (int round = 0; round < 500; ++round) {
    std::vector<uint32> rows(1 + random() % 9);
    for (uint32& of : rows) of = random() % 3 == 0 ? 0 : static_cast<uint32>(random() % 300);
    take_all({rows, 1 + static_cast<uint32>(random() % 40), 1 + static_cast<uint32>(random() % 20),
              1 + static_cast<uint32>(random() % 132), static_cast<uint32>(random() % 1000)},
             rows);
  }
}

TEST(MoeTasks, NoRows) {
  const std::vector<uint32> rows(3);
  EXPECT_EQ(take_all({rows, 4, 4, 132, 0}, rows), 0u);
}

TEST(MoeTasks, LastTilesAreWholeWaves) {
  // 20 groups of rows: 160 tiles of the second product on 132 blocks, so 28 come early.
  const std::vector<uint32> rows(4, 5 * kRows);
  EXPECT_EQ(take_all({rows, 64, 8, 132, 0}, rows), 28u);
  // Fewer than blocks: all come last.
  EXPECT_EQ(take_all({rows, 64, 4, 132, 0}, rows), 0u);
}

}  // namespace
}  // namespace ark::device
