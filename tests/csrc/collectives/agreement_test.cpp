// Checks the error that disagreeing ranks get: whose error it is, which rank it blames, and what both called.
#include "collectives/agreement.hpp"

#include <gtest/gtest.h>

namespace ark::test {
namespace {

Operation all_reduce(uint64_t count) {
  Operation operation;
  operation.context.name = "all_reduce";
  operation.context.sequence = 7;
  operation.descriptor.kind = Kind::all_reduce;
  operation.descriptor.dtype = DType::f32;
  operation.descriptor.op = ReduceOp::sum;
  operation.descriptor.root = -1;
  operation.descriptor.sequence = 7;
  operation.descriptor.count = count;
  return operation;
}

TEST(Agreement, SaysNothingWhereAllIsAlike) {
  EXPECT_FALSE(disagreement(all_reduce(8), all_reduce(8).descriptor, 2, 1));
  EXPECT_FALSE(broken_promise(all_reduce(8), 2, 0, 1, 64, 64));
}

TEST(Agreement, NamesBothRanksAndWhatTheyCalled) {
  const auto error = disagreement(all_reduce(8), all_reduce(9).descriptor, 2, 1);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::mismatch);
  EXPECT_EQ(error->context().rank, 2);
  EXPECT_EQ(error->context().peer, 1);
  EXPECT_EQ(error->context().operation, "all_reduce");
  EXPECT_EQ(error->context().sequence, 7u);
  const std::string text = error->what();
  EXPECT_NE(text.find("rank 2 called all_reduce(8 x float32, SUM) #7"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 1 called all_reduce(9 x float32, SUM) #7"), std::string::npos) << text;
}

TEST(Agreement, AnotherOrderOfAdditionsIsNamedWithItsOption) {
  Operation flat = all_reduce(8);
  flat.descriptor.algorithm = kFlatOrder;
  const auto error = disagreement(all_reduce(8), flat.descriptor, 2, 1);
  ASSERT_TRUE(error);
  const std::string text = error->what();
  EXPECT_NE(text.find("rank 2 called all_reduce(8 x float32, SUM) #7"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 1 called all_reduce(8 x float32, SUM, order flat) #7"), std::string::npos) << text;
  EXPECT_NE(text.find("Options.order"), std::string::npos) << text;
}

TEST(Agreement, RoundedPartialsAreNamedWithTheirOption) {
  Operation rounded = all_reduce(8);
  rounded.descriptor.algorithm = kInputPartials;
  const auto error = disagreement(all_reduce(8), rounded.descriptor, 2, 1);
  ASSERT_TRUE(error);
  const std::string text = error->what();
  EXPECT_NE(text.find("rank 1 called all_reduce(8 x float32, SUM, partials input) #7"), std::string::npos) << text;
  EXPECT_NE(text.find("Options.partials (ARK_PARTIALS)"), std::string::npos) << text;
}

TEST(Agreement, OfAShapeAloneIsToldAsSuch) {
  Operation reshaped = all_reduce(8);
  reshaped.descriptor.shape = 5;
  const auto error = disagreement(all_reduce(8), reshaped.descriptor, 0, 3);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->context().peer, 3);
  EXPECT_NE(std::string(error->what()).find("a tensor of another shape"), std::string::npos);
}

TEST(Agreement, ABrokenPromiseBlamesTheOtherEnd) {
  for (const auto& [rank, peer] : {std::pair{0, 1}, std::pair{1, 0}, std::pair{2, 0}}) {
    const auto error = broken_promise(all_reduce(8), rank, 0, 1, 64, 32);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->context().rank, rank);
    EXPECT_EQ(error->context().peer, peer);
    EXPECT_NE(std::string(error->what()).find("rank 0 sends 64 bytes to rank 1"), std::string::npos);
  }
}

TEST(Agreement, WhatCannotBeReadIsNotShown) {
  Operation broken = all_reduce(8);
  broken.descriptor.dtype = static_cast<DType>(200);
  const auto error = disagreement(all_reduce(8), broken.descriptor, 0, 1);
  ASSERT_TRUE(error);
  EXPECT_NE(std::string(error->what()).find("rank 1 called something unreadable"), std::string::npos);
}

}  // namespace
}  // namespace ark::test
