// Tests the table of registered memory: what is inside a window and what is not, overlaps, boundaries and many threads.
#include "collectives/cuda/windows.hpp"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <thread>

namespace ark {
namespace {

// Ranges of this array stand for device memory. Nothing here is read or written.
char memory[1 << 16];

Windows::Base base_of(char* own, int rank, int ranks) {
  Windows::Base base{};
  for (int r = 0; r < ranks; ++r) base[r] = r == rank ? own : reinterpret_cast<char*>(uintptr_t{0x1000} * (r + 1));
  return base;
}

void add(Windows& windows, uint32_t id, size_t from, size_t bytes, std::shared_ptr<void> held = nullptr) {
  windows.add(id, memory + from, bytes, base_of(memory + from, 0, 2), base_of(memory + from, 0, 2), std::move(held));
}

TEST(Windows, FindNothingWhenEmpty) {
  Windows windows;
  EXPECT_FALSE(windows.find(memory, 1));
  EXPECT_EQ(windows.size(), 0u);
  EXPECT_EQ(windows.remove(1), nullptr);
}

TEST(Windows, FindWhatLiesInOne) {
  Windows windows;
  add(windows, 7, 1000, 500);
  const auto found = windows.find(memory + 1100, 400);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->id, 7u);
  EXPECT_EQ(found->offset, 100u);
  EXPECT_EQ(found->base[0], memory + 1000);
  EXPECT_EQ(found->base[1], reinterpret_cast<char*>(0x2000));
  EXPECT_TRUE(windows.find(memory + 1000, 500));
  EXPECT_TRUE(windows.find(memory + 1499, 1));
}

TEST(Windows, RefuseWhatStandsOut) {
  Windows windows;
  add(windows, 1, 1000, 500);
  EXPECT_FALSE(windows.find(memory + 1100, 401));
  EXPECT_FALSE(windows.find(memory + 999, 10));
  EXPECT_FALSE(windows.find(memory + 1500, 1));
  EXPECT_FALSE(windows.find(memory + 1000, 0));
  EXPECT_FALSE(windows.find(memory + 900, 5000));
}

TEST(Windows, NeighboursAreNotOne) {
  Windows windows;
  add(windows, 1, 1000, 500);
  add(windows, 2, 1500, 500);
  EXPECT_FALSE(windows.find(memory + 1400, 200));
  EXPECT_EQ(windows.find(memory + 1500, 500)->id, 2u);
  EXPECT_EQ(windows.find(memory + 1000, 500)->id, 1u);
}

TEST(Windows, TakeTheNewestThatHoldsTheBuffer) {
  Windows windows;
  add(windows, 3, 0, 10000);
  add(windows, 5, 2000, 100);
  add(windows, 4, 2000, 1000);
  EXPECT_EQ(windows.find(memory + 2010, 50)->id, 5u);
  EXPECT_EQ(windows.find(memory + 2010, 50)->offset, 10u);
  EXPECT_EQ(windows.find(memory + 2010, 500)->id, 4u);
  EXPECT_EQ(windows.find(memory + 2010, 5000)->id, 3u);
  EXPECT_EQ(windows.find(memory + 9000, 1000)->id, 3u);  // after two windows that end before it
  EXPECT_EQ(windows.id_of(memory + 2000, 1000), 4u);
  EXPECT_EQ(windows.id_of(memory + 2000, 999), 0u);
}

TEST(Windows, HoldUntilRemoved) {
  Windows windows;
  auto first = std::make_shared<int>(1), second = std::make_shared<int>(2);
  add(windows, 1, 0, 10, first);
  add(windows, 2, 0, 10, second);
  EXPECT_EQ(first.use_count(), 2);
  EXPECT_EQ(windows.remove(1), first);
  EXPECT_EQ(first.use_count(), 1);
  EXPECT_EQ(windows.find(memory, 10)->id, 2u);
  EXPECT_EQ(windows.clear().size(), 1u);
  EXPECT_EQ(second.use_count(), 1);
  EXPECT_FALSE(windows.find(memory, 10));
  EXPECT_EQ(windows.size(), 0u);
}

// Compares with a linear search of all ranges.
TEST(Windows, AgreeWithASearchOfAll) {
  std::mt19937 random(11);
  Windows windows;
  std::map<uint32_t, std::pair<size_t, size_t>> ranges;
  for (uint32_t step = 1; step <= 3000; ++step) {
    if (ranges.size() > 40 || (step % 3 == 0 && !ranges.empty())) {
      auto gone = std::next(ranges.begin(), random() % ranges.size());
      windows.remove(gone->first);
      ranges.erase(gone);
    } else {
      const size_t from = random() % 30000, bytes = 1 + random() % (step % 5 == 0 ? 30000 : 500);
      add(windows, step, from, bytes);
      ranges[step] = {from, bytes};
    }
    const size_t from = random() % 30000, bytes = 1 + random() % 400;
    uint32_t expected = 0;
    for (const auto& [id, range] : ranges)
      if (range.first <= from && from + bytes <= range.first + range.second) expected = id;
    const auto found = windows.find(memory + from, bytes);
    ASSERT_EQ(found ? found->id : 0, expected) << "step " << step;
    if (found) {
      ASSERT_EQ(found->offset, from - ranges[expected].first);
    }
  }
}

TEST(Windows, ServeThreadsWhileOthersComeAndGo) {
  Windows windows;
  add(windows, 1, 0, 1000);
  std::atomic<bool> over{false};
  std::atomic<int> wrong{0};
  std::vector<std::thread> readers;
  for (int t = 0; t < 3; ++t) {
    readers.emplace_back([&] {
      while (!over) {
        const auto found = windows.find(memory + 10, 10);
        if (!found || found->id != 1 || found->offset != 10) ++wrong;
      }
    });
  }
  for (uint32_t id = 2; id < 2000; ++id) {
    add(windows, id, 2000 + id, 300);
    windows.remove(id);
  }
  over = true;
  for (auto& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace ark
