// Tests sums in two stages: rounded once, divided once, in the order of ranks and nodes.
#include "collectives/cpu/staged_reduce.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

namespace ark {
namespace {

constexpr size_t kCount = 2500;  // more than two blocks, plus a remainder

uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
float from_bfloat16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
std::vector<const void*> pointers(const std::vector<std::vector<T>>& of, size_t begin, size_t end) {
  std::vector<const void*> all;
  for (size_t i = begin; i < end; ++i) all.push_back(of[i].data());
  return all;
}

std::vector<std::vector<uint16_t>> halves(int ranks) {
  std::vector<std::vector<uint16_t>> inputs(ranks);
  for (int r = 0; r < ranks; ++r)
    for (size_t i = 0; i < kCount; ++i)
      inputs[r].push_back(to_bfloat16(std::sin(static_cast<float>(i * (r + 1))) * std::pow(10.0f, r % 3)));
  return inputs;
}

// Ranks 0 and 1 are on one node, 2 to 4 on another.
std::vector<uint16_t> staged(ReduceOp op, const std::vector<std::vector<uint16_t>>& inputs, const double* factors) {
  const StagedReduce reduction(DType::bf16, op, 5, false);
  std::vector<std::vector<float>> partials(2, std::vector<float>(kCount));
  EXPECT_EQ(reduction.partial_size(), sizeof(float));
  reduction.partial(partials[0].data(), pointers(inputs, 0, 2).data(), 2, kCount, factors);
  reduction.partial(partials[1].data(), pointers(inputs, 2, 5).data(), 3, kCount, factors ? factors + 2 : nullptr);
  std::vector<uint16_t> out(kCount);
  reduction.combine(out.data(), pointers(partials, 0, 2).data(), 2, kCount, nullptr);
  return out;
}

TEST(StagedReduce, HalfTypesAreRoundedOnceAndDividedInTheEnd) {
  const auto inputs = halves(5);
  const double factors[] = {0.5, 1.25, 3.0, -2.0, 0.75};
  const auto sum = staged(ReduceOp::sum, inputs, nullptr), average = staged(ReduceOp::avg, inputs, nullptr);
  const auto product = staged(ReduceOp::product, inputs, nullptr);
  const auto scaled = staged(ReduceOp::premul_sum, inputs, factors);
  for (size_t i = 0; i < kCount; ++i) {
    float x[5], y[5];
    for (int r = 0; r < 5; ++r) {
      x[r] = from_bfloat16(inputs[r][i]);
      y[r] = x[r] * static_cast<float>(factors[r]);
    }
    const float total = (x[0] + x[1]) + (x[2] + x[3] + x[4]);
    ASSERT_EQ(sum[i], to_bfloat16(total)) << i;
    ASSERT_EQ(average[i], to_bfloat16(total / 5)) << i;
    ASSERT_EQ(product[i], to_bfloat16((x[0] * x[1]) * (x[2] * x[3] * x[4]))) << i;
    ASSERT_EQ(scaled[i], to_bfloat16((y[0] + y[1]) + (y[2] + y[3] + y[4]))) << i;
  }
}

TEST(StagedReduce, PartialsOfTheInputsTypeAreRounded) {
  const auto inputs = halves(5);
  const StagedReduce reduction(DType::bf16, ReduceOp::avg, 5, false, false);
  ASSERT_EQ(reduction.partial_size(), sizeof(uint16_t));
  std::vector<std::vector<uint16_t>> partials(2, std::vector<uint16_t>(kCount));
  reduction.partial(partials[0].data(), pointers(inputs, 0, 2).data(), 2, kCount, nullptr);
  reduction.partial(partials[1].data(), pointers(inputs, 2, 5).data(), 3, kCount, nullptr);
  std::vector<uint16_t> out(kCount);
  reduction.combine(out.data(), pointers(partials, 0, 2).data(), 2, kCount, nullptr);
  for (size_t i = 0; i < kCount; ++i) {
    float x[5];
    for (int r = 0; r < 5; ++r) x[r] = from_bfloat16(inputs[r][i]);
    const float first = from_bfloat16(to_bfloat16(x[0] + x[1])),
                second = from_bfloat16(to_bfloat16(x[2] + x[3] + x[4]));
    ASSERT_EQ(out[i], to_bfloat16((first + second) / 5)) << i;
  }
  EXPECT_NE(out, staged(ReduceOp::avg, inputs, nullptr));
}

TEST(StagedReduce, ExtremaStayInTheirType) {
  const StagedReduce reduction(DType::bf16, ReduceOp::max, 5, false);
  EXPECT_EQ(reduction.partial_size(), sizeof(uint16_t));
}

TEST(StagedReduce, ComplexHalvesAsPairs) {
  const StagedReduce reduction(DType::c32, ReduceOp::sum, 2, false);
  EXPECT_EQ(reduction.partial_size(), 2 * sizeof(float));
  const std::vector<std::vector<uint16_t>> inputs = {{0x3c00, 0x4000}, {0x3c00, 0x3c00}};  // 1 + 2i, 1 + i
  float partial[2];
  reduction.partial(partial, pointers(inputs, 0, 2).data(), 2, 1, nullptr);
  EXPECT_EQ(partial[0], 2.0f);
  EXPECT_EQ(partial[1], 3.0f);
  const void* sources[] = {partial, partial};
  uint16_t out[2];
  reduction.combine(out, sources, 2, 1, nullptr);
  EXPECT_EQ(out[0], 0x4400);  // 4
  EXPECT_EQ(out[1], 0x4600);  // 6
}

TEST(StagedReduce, FlatIsOneStageInTheTensorsType) {
  const auto inputs = halves(3);
  const StagedReduce reduction(DType::bf16, ReduceOp::premul_sum, 3, true);
  EXPECT_EQ(reduction.partial_size(), sizeof(uint16_t));
  const double factors[] = {0.5, 1.25, 3.0};
  std::vector<uint16_t> out(kCount), expected(kCount);
  reduction.combine(out.data(), pointers(inputs, 0, 3).data(), 3, kCount, factors);
  find_reduce(DType::bf16, ReduceOp::premul_sum)(expected.data(), nullptr, pointers(inputs, 0, 3).data(), 3, kCount,
                                                 factors);
  EXPECT_EQ(out, expected);
}

TEST(StagedReduce, AverageOfDoublesIsByAllRanks) {
  const StagedReduce reduction(DType::f64, ReduceOp::avg, 6, false);
  const double a[] = {3.0, -0.0, 1.0}, b[] = {9.0, -0.0, 1.0};
  const void* sources[] = {a, b};
  double out[3];
  reduction.combine(out, sources, 2, 3, nullptr);
  EXPECT_EQ(out[0], 2.0);
  EXPECT_TRUE(out[1] == 0.0 && std::signbit(out[1]));
  EXPECT_EQ(out[2], 2.0 / 6.0);
}

}  // namespace
}  // namespace ark
