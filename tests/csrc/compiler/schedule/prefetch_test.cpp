// Tests what a GPU's tasks prefetch for later tasks (emit_tables.hpp).
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "compiler/emit/common/emit_tables.hpp"
#include "compiler/graph/graph_builder.hpp"
#include "compiler/passes/pipeline.hpp"
#include "compiler/schedule/targets.hpp"

namespace {

using namespace ark::compiler;

Load load_of(int task, int64_t offset, int64_t bytes, int64_t rows = 1, int64_t stride = 0) {
  Load load;
  load.task = task;
  load.value = task;
  load.offset = offset;
  load.bytes = bytes;
  load.rows = rows;
  load.stride = stride;
  return load;
}

// Returns, by position, how many bytes of each task were prefetched so far. Checks what holds for all queues.
std::vector<std::vector<int64_t>> asked_for(const Queue& queue, int64_t most) {
  const auto asked = loads_ahead(queue, most, most);
  EXPECT_EQ(asked.size(), queue.tasks.size());
  std::vector<std::vector<int64_t>> table;
  std::vector<int64_t> so_far(queue.tasks.size(), 0);
  for (size_t now = 0; now < asked.size(); ++now) {
    for (const Load& load : asked[now]) {
      size_t position = 0;
      while (queue.tasks[position] != load.task) ++position;
      EXPECT_GT(position, now) << "a task's own turn is too late";
      so_far[position] += load.rows * load.bytes;
    }
    int64_t in_advance = 0;
    for (size_t later = now + 1; later < so_far.size(); ++later) in_advance += so_far[later];
    EXPECT_LE(in_advance, most);
    table.push_back(so_far);
  }
  return table;
}

TEST(LoadsAhead, LargeOnesComeInParts) {
  Queue queue;
  queue.tasks = {7, 3, 5, 9};
  queue.loads = {load_of(7, 0, 50000), load_of(3, 0, 20000), load_of(5, 4096, 100000), load_of(9, 0, 8192)};
  const auto table = asked_for(queue, 65536);
  EXPECT_EQ(table[0], (std::vector<int64_t>{0, 20000, 45056, 0}));  // the first task loads its own data
  EXPECT_EQ(table[1], (std::vector<int64_t>{0, 20000, 65536, 0}));
  EXPECT_EQ(table[2][3], 8192);  // the third task loads what was not prefetched
  EXPECT_EQ(table[2][2], 65536);
  // Its parts are consecutive.
  const auto asked = loads_ahead(queue, 65536, 65536);
  ASSERT_EQ(asked[1].size(), 1u);
  EXPECT_EQ(asked[1][0].offset, 4096 + 45056);
}

TEST(LoadsAhead, OnlyNeighboursAreOne) {
  const auto merged = merged_loads({load_of(1, 0, 100), load_of(1, 100, 50), load_of(1, 200, 10), load_of(2, 210, 10)});
  ASSERT_EQ(merged.size(), 3u);
  EXPECT_EQ(merged[0].bytes, 150);
  EXPECT_EQ(merged[1].offset, 200) << "there is a gap in front of it";
  EXPECT_EQ(merged[1].bytes, 10);
  EXPECT_EQ(merged[2].task, 2);
  const auto rows =
      merged_loads({load_of(1, 0, 64, 4, 256), load_of(1, 1024, 64, 4, 256), load_of(1, 2304, 64, 4, 256)});
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].rows, 8);
  EXPECT_EQ(rows[1].offset, 2304);
}

TEST(LoadsAhead, RowsComeWhole) {
  Queue queue;
  queue.tasks = {0, 1, 2};
  queue.loads = {load_of(1, 0, 64, 2000, 4096), load_of(2, 0, 64, 100, 4096)};
  EXPECT_EQ(asked_for(queue, 65536)[0], (std::vector<int64_t>{0, 0, 0}));  // 128,000 bytes at once are too many
  EXPECT_EQ(asked_for(queue, 65536)[1], (std::vector<int64_t>{0, 0, 6400}));
  EXPECT_EQ(asked_for(queue, 200000)[0], (std::vector<int64_t>{0, 128000, 6400}));
}

// Weights for blocks of rows, and a scale for all rows. They are prefetched once, by workers that take turns.
TEST(LoadsAhead, TasksShareWhatTheyAllRead) {
  GraphBuilder builder;
  const int x = builder.input({384, 512}), weights = builder.parameter({512, 512}), scale = builder.parameter({512});
  const int made = builder.matmul(builder.pointwise("mul", {x, scale}), weights);
  builder.copy_out(builder.reduce("amax", made, {1}));
  const Plan plan = make_plan(builder.graph, gpu_target("sm_90a", 60));
  std::map<int, std::vector<int>> asked;  // by value and byte
  std::map<int, size_t> workers;
  int64_t before = 0;
  for (const Queue& queue : plan.queues)
    for (const Load& load : queue.loads) before += load.bytes * load.rows;
  for (const std::vector<Load>& loads : plan.prefetches) {
    std::set<int> here;
    for (const Load& load : loads) {
      std::vector<int>& bytes = asked[load.value];
      bytes.resize(static_cast<size_t>(plan.graph.buffer_of(load.value).bytes), 0);
      for (int64_t row = 0; row < load.rows; ++row)
        for (int64_t byte = 0; byte < load.bytes; ++byte)
          ++bytes[static_cast<size_t>(load.offset + row * load.stride + byte)];
      here.insert(load.value);
    }
    for (const int value : here) ++workers[value];
  }
  EXPECT_GT(before, 3 * (512 + 1) * 512 * 4);  // at least three blocks of rows
  ASSERT_EQ(asked.size(), 2u);
  size_t most = 0;
  for (const auto& [value, bytes] : asked) {
    EXPECT_EQ(std::count(bytes.begin(), bytes.end(), 1), std::ssize(bytes));
    most = std::max(most, workers[value]);
  }
  EXPECT_GT(most, 30u);
}

}  // namespace
