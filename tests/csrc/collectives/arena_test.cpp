// How many lanes a launch needs for parts that differ by a few bytes.
#include "collectives/cuda/arena.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace ark {
namespace {

// Sizes about which a step gets a row more, so that a part of 16 bytes less takes more lanes.
TEST(Lanes, AreThoseOfThePartThatTakesMost) {
  bool shorter_takes_more = false;
  for (const int ranks : {2, 3, 4, 5, 8}) {
    const RingSet set = ArenaLayout(ranks).collectives;
    for (const bool chunked : {false, true}) {
      const uint64_t row = chunked ? device::Chunks::kRowData : device::Lines::kRowData;
      for (uint64_t step = 1; step <= 20; ++step) {
        for (int64_t off = -16 * ranks; off <= 16 * ranks; off += 16) {
          const uint64_t part = row * set.lines.lanes * step + off;
          for (int shorter = 0; shorter < ranks; ++shorter) {
            std::vector<uint64_t> bytes(ranks, part);
            bytes[ranks - 1] -= 16 * shorter;
            const uint32_t lanes = lanes_of_parts(set, bytes.data(), ranks, chunked);
            for (const uint64_t each : bytes) ASSERT_LE(lanes_of(set, each, chunked), lanes) << each << " of " << part;
            ASSERT_LE(lanes, set.lines.lanes);
            shorter_takes_more |= lanes_of(set, bytes[ranks - 1], chunked) > lanes_of(set, part, chunked);
          }
        }
      }
    }
  }
  EXPECT_TRUE(shorter_takes_more) << "otherwise this test sees nothing";
}

TEST(Lanes, NothingTakesNone) {
  const uint64_t none[2] = {0, 0};
  EXPECT_EQ(lanes_of_parts(ArenaLayout(2).collectives, none, 2, false), 0u);
}

}  // namespace
}  // namespace ark
