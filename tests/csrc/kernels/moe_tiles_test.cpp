// Plays the blocks of experts' products on the CPU: they compute each element once, and idle blocks share the last
// wave.
#include "cuda/fused/moe_tiles.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <vector>

#include "support/night.hpp"

namespace ark::device {
namespace {

constexpr MatmulShape kLarge{128, 256}, kSmall{64, 64};

// Like MoeCounts on the device; it also checks that experts are asked for in order.
class PlayedCounts {
 public:
  explicit PlayedCounts(const std::vector<uint32>& counts) : counts_(&counts) {}
  template <class F>
  uint32 sum(F&& f) const {
    uint32 all = 0;
    for (const uint32 count : *counts_) all += f(count);
    return all;
  }
  uint32 at(uint32 expert) {
    EXPECT_EQ(expert, asked_++);
    return counts_->at(expert);
  }

 private:
  const std::vector<uint32>* counts_;
  uint32 asked_ = 0;
};

struct Product {
  std::vector<uint32> counts;
  uint32 columns = 0, blocks = 0;
};

template <int kRows, int kColumns, int kOut>
void play(const Product& product) {
  const auto& [counts, columns, blocks] = product;
  std::vector<uint32> expert_of;
  for (uint32 e = 0; e < counts.size(); ++e) expert_of.insert(expert_of.end(), counts[e], e);
  const uint32 units = columns / 8;
  std::vector<int> computed(expert_of.size() * units);
  for (uint32 block = 0; block < blocks; ++block) {
    MoeTiles<kRows, kColumns, kOut, PlayedCounts> tiles(PlayedCounts(counts), columns, block, blocks);
    MoeTile tile{};
    uint32 n = 0;
    for (; tiles.find(n, tile); ++n) {
      ASSERT_TRUE(tile.rows > 0 && tile.rows <= kRows && tile.column % 8 == 0 && tile.column < columns);
      ASSERT_TRUE(n < tiles.waves().whole ? tile.across == 1 : tile.across <= moe_most_across({kRows, kColumns}));
      const uint32 end = std::min(columns, tile.column + kOut / tile.across);
      for (uint32 row = tile.row; row < tile.row + tile.rows; ++row) {
        ASSERT_EQ(expert_of.at(row), tile.expert);
        for (uint32 unit = tile.column / 8; unit < end / 8; ++unit) ++computed[row * units + unit];
      }
    }
    ASSERT_LE(n, tiles.waves().whole + 1);
  }
  for (const int times : computed) ASSERT_EQ(times, 1);
}

Product random_product(std::mt19937& random) {
  const auto below = [&](uint32 end) { return static_cast<uint32>(random() % end); };
  Product product{{}, 8 * (1 + below(80)), 1 + below(140)};
  for (uint32 experts = 1 + below(below(3) == 0 ? 70 : 5); experts > 0; --experts)
    product.counts.push_back(below(3) == 0 ? 0 : 1 + below(below(2) == 0 ? 20 : 400));
  return product;
}

TEST(MoeTiles, ComputeEachElementOnce) {
  std::mt19937 random(7);
  for (int i = 0; i < test::cases(240); ++i) {
    const Product product = random_product(random);
    play<128, 256, 256>(product), play<128, 256, 128>(product);
    play<128, 128, 128>(product), play<128, 128, 64>(product);
    play<64, 128, 128>(product), play<64, 128, 64>(product);
    play<64, 64, 64>(product), play<64, 64, 32>(product);
    if (HasFatalFailure()) FAIL() << "product " << i;
  }
}

TEST(MoeTiles, ComputeNothingWithoutRows) {
  play<128, 256, 256>({{0, 0, 0}, 256, 12});
  play<64, 64, 32>({{}, 256, 12});
}

// 152 tiles, as four experts of 2048 x 8192 have in their second product with 502 to 520 rows each.
TEST(MoeTiles, DivideTheLastWave) {
  using Numbers = std::array<uint32, 4>;
  const auto divided = [](uint32 tiles, MatmulShape shape) {
    const MoeWaves waves(tiles, 132, shape);
    return Numbers{waves.whole, waves.left, waves.across, waves.down};
  };
  EXPECT_EQ(divided(152, kLarge), (Numbers{1, 20, 4, 1}));
  EXPECT_EQ(divided(148, kLarge), (Numbers{1, 16, 4, 2}));
  EXPECT_EQ(divided(132 + 66, kLarge), (Numbers{1, 66, 2, 1}));
  EXPECT_EQ(divided(132 + 67, kLarge), (Numbers{1, 67, 1, 1}));
  EXPECT_EQ(divided(8, kLarge), (Numbers{0, 8, 4, 2}));
  EXPECT_EQ(divided(8, kSmall), (Numbers{0, 8, 2, 1}));
}

TEST(MoeTiles, DivideAsFarAsBlocksAreIdle) {
  for (const MatmulShape& shape : {kLarge, MatmulShape{128, 128}, MatmulShape{64, 128}, kSmall})
    for (uint32 blocks = 1; blocks < 140; ++blocks)
      for (uint32 tiles = 1; tiles < 300; ++tiles) {
        const MoeWaves waves(tiles, blocks, shape);
        ASSERT_EQ(waves.whole * blocks + waves.left, tiles);
        const uint32 most = moe_most_across(shape) * moe_most_down(shape), parts = waves.across * waves.down;
        ASSERT_LE(waves.left * parts, blocks);
        if (waves.left != 0) {
          ASSERT_TRUE(parts == most || waves.left * parts * 2 > blocks);
        }
      }
}

}  // namespace
}  // namespace ark::device
