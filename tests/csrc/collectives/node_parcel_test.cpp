// Tests where the blocks of a parcel are.
#include "collectives/node_parcel.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace ark {
namespace {

TEST(NodeParcel, HoldsSmallBlocksOneAfterTheOther) {
  const std::vector<uint64_t> sizes = {5, 101, 0, 100, 7};
  const NodeParcel parcel(sizes.data(), 5, 100);
  const std::vector<bool> holds = {true, false, true, true, true};
  const std::vector<size_t> offsets = {0, 5, 5, 5, 105};
  for (int rank = 0; rank < 5; ++rank) {
    EXPECT_EQ(parcel.holds(rank), holds[rank]) << rank;
    EXPECT_EQ(parcel.offset(rank), offsets[rank]) << rank;
  }
  EXPECT_EQ(parcel.bytes(), 112u);
}

TEST(NodeParcel, IsEmptyWhereAllAreLarge) {
  const std::vector<uint64_t> sizes = {9, 9};
  EXPECT_EQ(NodeParcel(sizes.data(), 2, 8).bytes(), 0u);
  EXPECT_FALSE(NodeParcel(sizes.data(), 2, 8).holds(1));
}

}  // namespace
}  // namespace ark
