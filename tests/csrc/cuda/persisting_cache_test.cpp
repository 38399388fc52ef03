// Tests that the cache set aside follows what is asked for, and that the process finds its own size again, on the
// pretended driver.
#include "cuda/persisting_cache.hpp"

#include <gtest/gtest.h>

#include <memory>

#include "cuda/driver.hpp"

namespace ark {
namespace {

constexpr size_t kMost = size_t{32} << 20;  // the pretended device's

size_t aside() {
  size_t bytes = 0;
  driver().ctx_get_limit(&bytes, CU_LIMIT_PERSISTING_L2_CACHE_SIZE);
  return bytes;
}

class PersistingCacheTest : public testing::Test {
 protected:
  PersistingCacheTest() { set(0); }
  ~PersistingCacheTest() override { set(0); }
  static void set(size_t bytes) { driver().ctx_set_limit(CU_LIMIT_PERSISTING_L2_CACHE_SIZE, bytes); }
};

TEST_F(PersistingCacheTest, IsAsLargeAsTheLargestThatLives) {
  auto small = std::make_unique<PersistingCache>(0, 1000);
  EXPECT_EQ(aside(), 1000u);
  auto large = std::make_unique<PersistingCache>(0, 5000);
  EXPECT_EQ(aside(), 5000u);
  large.reset();
  EXPECT_EQ(aside(), 1000u);
  small.reset();
  EXPECT_EQ(aside(), 0u);
}

TEST_F(PersistingCacheTest, TheProcesssOwnSizeIsNeverMadeSmaller) {
  set(3000);
  {
    const PersistingCache small(0, 1000);
    EXPECT_EQ(aside(), 3000u);
    const PersistingCache large(0, 5000);
    EXPECT_EQ(aside(), 5000u);
  }
  EXPECT_EQ(aside(), 3000u);
}

TEST_F(PersistingCacheTest, WhatTheProcessSetsMeanwhileStays) {
  {
    const PersistingCache one(0, 1000);
    set(7000);
  }
  EXPECT_EQ(aside(), 7000u);
}

TEST_F(PersistingCacheTest, AWindowSharesWhatThereIs) {
  char memory = 0;
  const PersistingCache all(0, 1000);
  const CUaccessPolicyWindow whole = all.window(&memory, 1000);
  EXPECT_EQ(whole.base_ptr, &memory);
  EXPECT_EQ(whole.num_bytes, 1000u);
  EXPECT_EQ(whole.hitRatio, 1.0F);
  EXPECT_EQ(whole.hitProp, CU_ACCESS_PROPERTY_PERSISTING);
  const PersistingCache part(0, 4 * kMost);
  EXPECT_EQ(aside(), kMost);
  EXPECT_EQ(part.window(&memory, 4 * kMost).hitRatio, 0.25F);
  EXPECT_EQ(part.window(&memory, 40 * kMost).num_bytes, size_t{128} << 20);
}

TEST_F(PersistingCacheTest, NothingAskedForIsNothingSetAside) {
  char memory = 0;
  const PersistingCache none(0, 0);
  EXPECT_EQ(aside(), 0u);
  EXPECT_EQ(none.window(&memory, 1000).num_bytes, 0u);
}

}  // namespace
}  // namespace ark
