// Tests which way collectives over several nodes take at each size, and that pieces cover the tensor.
#include "collectives/carried_path.hpp"

#include <gtest/gtest.h>

#include "collectives/dispatch.hpp"

namespace ark {
namespace {

const NodePlan kTwoByTwo({0, 0, 1, 1}, 0), kThreeByTwo({0, 0, 0, 1, 1, 1}, 0), kFlat({0, 1, 2}, 0);

CarriedWay way(Kind kind, size_t bytes, const NodePlan& plan = kTwoByTwo, size_t partial = 4) {
  return carried_path(kind, bytes, 4, partial, plan).way;
}

TEST(CarriedPath, SmallTensorsGoWithFirstMessages) {
  for (const Kind kind : {Kind::all_reduce, Kind::reduce, Kind::reduce_scatter, Kind::broadcast, Kind::all_to_all}) {
    EXPECT_EQ(way(kind, kFirstRoom), CarriedWay::first) << name_of(kind);
    EXPECT_NE(way(kind, kFirstRoom + 4), CarriedWay::first) << name_of(kind);
  }
  EXPECT_EQ(way(Kind::all_gather, kFirstRoom / 2), CarriedWay::first);  // both blocks of the node
  EXPECT_EQ(way(Kind::all_gather, kFirstRoom / 2 + 4), CarriedWay::pieces);
}

TEST(CarriedPath, SumsGoWholeToALimitOfPartials) {
  EXPECT_EQ(way(Kind::all_reduce, 16 << 10), CarriedWay::whole);
  EXPECT_EQ(way(Kind::all_reduce, (16 << 10) + 4), CarriedWay::pieces);
  EXPECT_EQ(way(Kind::all_reduce, 16 << 10, kTwoByTwo, 8), CarriedWay::pieces);  // partials twice as wide
  EXPECT_EQ(way(Kind::all_reduce, 16 << 10, kThreeByTwo), CarriedWay::pieces);
  EXPECT_EQ(way(Kind::reduce, 1 << 20), CarriedWay::whole);
  EXPECT_EQ(way(Kind::reduce, (1 << 20) + 4), CarriedWay::pieces);
}

TEST(CarriedPath, ParcelsWhereNodesHaveThreeRanks) {
  EXPECT_EQ(way(Kind::all_to_all, 64, kThreeByTwo), CarriedWay::parcels);
  EXPECT_EQ(way(Kind::all_to_all, 4096, kTwoByTwo), CarriedWay::blocks);
  EXPECT_EQ(way(Kind::gather, 4096, kThreeByTwo), CarriedWay::parcels);
  EXPECT_EQ(way(Kind::gather, 64, kThreeByTwo), CarriedWay::first);
  EXPECT_EQ(way(Kind::scatter, 4096, kThreeByTwo), CarriedWay::blocks);  // until nodes have eight
}

TEST(CarriedPath, PiecesCoverTheTensorAndFitRounds) {
  for (const NodePlan& plan : {kTwoByTwo, kThreeByTwo, kFlat}) {
    for (const Kind kind : {Kind::all_reduce, Kind::reduce, Kind::reduce_scatter, Kind::all_gather, Kind::broadcast}) {
      for (const size_t bytes : {size_t{2} << 10, size_t{1} << 20, (size_t{5} << 20) + 12}) {
        const CarriedPath path = carried_path(kind, bytes, 4, 4, plan);
        EXPECT_GE(path.piece * path.pieces, bytes);
        EXPECT_LT(path.piece * (path.pieces - 1), bytes);
        EXPECT_EQ(path.piece % 4, 0u);
        if (path.way != CarriedWay::pieces) continue;
        const size_t blocks = kind == Kind::reduce_scatter && !plan.flat() ? plan.ranks() : 1;
        EXPECT_LE(path.piece * blocks, kMaxChunkBytes);
      }
    }
  }
}

}  // namespace
}  // namespace ark
