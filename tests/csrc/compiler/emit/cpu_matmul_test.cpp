// Compares the CPU target's matrix products with double: types, strides, odd sizes, bias, and tiles on every axis. The
// number of workers must not change any bit.
#include <gtest/gtest.h>

#include "compiler/emit/cpu_case.hpp"

namespace ark::compiler::test {
namespace cpu_matmul_test {

constexpr ScalarType kFloats[] = {ScalarType::f32, ScalarType::bf16, ScalarType::f16};

struct MatmulCase {
  int a, b, out, bias = -1;
  int64_t batch, m, n, k;
};

// Strides of a [batch, rows, columns] value with adjacent rows, adjacent columns, or neither.
Shape matrix_strides(CpuCase& made, int64_t rows, int64_t columns) {
  switch (made.pick(0, 3)) {
    case 0: return {rows * columns + 3, columns, 1};
    case 1: return {rows * columns, 1, rows};
    case 2: return {rows * (columns + 5), columns + 5, 1};
    default: return {rows * columns * 2, columns * 2, 2};
  }
}

MatmulCase add_matmul(CpuCase& made, int64_t batch, int64_t m, int64_t n, int64_t k, MatmulStage::Axis axis) {
  auto type = [&] { return kFloats[made.pick(0, 2)]; };
  MatmulCase one{-1, -1, -1, -1, batch, m, n, k};
  const int64_t offset = made.pick(0, 3);
  one.a = made.input(type(), {batch, m, k}, CpuCase::normal(), matrix_strides(made, m, k), offset);
  one.b = made.input(type(), {batch, k, n}, CpuCase::normal(), matrix_strides(made, k, n), offset, false, true);
  one.out = made.output(type(), {batch, m, n}, made.pick(0, 3) == 0 ? Shape{m * n, 1, m} : Shape{});
  if (made.pick(0, 1) == 0) one.bias = made.input(type(), {n}, CpuCase::normal());
  MatmulStage body;
  body.a = one.a;
  body.b = one.b;
  body.out = one.out;
  body.bias = one.bias;
  body.batch = batch, body.m = m, body.n = n, body.k = k;
  body.axis = axis;
  using Axis = MatmulStage::Axis;
  const bool rows = axis == Axis::rows, columns = axis == Axis::columns;
  std::vector<Access> accesses{{one.a,
                                columns ? -1
                                : rows  ? 1
                                        : 0,
                                false},
                               {one.b,
                                columns ? 2
                                : rows  ? -1
                                        : 0,
                                false},
                               {one.out,
                                columns ? 2
                                : rows  ? 1
                                        : 0,
                                true}};
  if (one.bias >= 0) accesses.push_back({one.bias, columns ? 0 : -1, false});
  made.stage(body, accesses, columns ? n : rows ? m : batch);
  return one;
}

void expect_product(CpuCase& made, const MatmulCase& one) {
  const ScalarType type = made.graph.values()[static_cast<size_t>(one.out)].type;
  int64_t wrong = 0;
  for_each_index({one.batch, one.m, one.n}, [&](const std::vector<int64_t>& at) {
    double sum = 0, magnitude = 0;
    for (int64_t d = 0; d < one.k; ++d) {
      const double term = made.get(one.a, {at[0], at[1], d}) * made.get(one.b, {at[0], d, at[2]});
      sum += term;
      magnitude += std::abs(term);
    }
    if (one.bias >= 0) sum += made.get(one.bias, {at[2]});
    const double got = made.get(one.out, at);
    const double allowed = 0x1p-22 * (magnitude + 1) + epsilon_of(type) * std::abs(sum) * 1.01 + 1e-7;
    if (!(std::abs(got - sum) <= allowed) && ++wrong < 4)
      ADD_FAILURE() << name_of(type) << " [" << one.batch << ", " << one.m << ", " << one.n << ", " << one.k << "] at "
                    << at[0] << ", " << at[1] << ", " << at[2] << ": " << got << ", not " << sum;
  });
  EXPECT_EQ(wrong, 0);
}

TEST(CpuMatmulTest, RandomAgainstDouble) {
  CpuCase made(7);
  std::vector<MatmulCase> all;
  for (int i = 0; i < ark::test::cases(24 / kSanitizersShare); ++i) {
    const auto axis = static_cast<MatmulStage::Axis>(i % 3);
    const int64_t m = i % 4 == 0 ? 1 : made.pick(1, 60);
    all.push_back(add_matmul(made, made.pick(1, 3), m, made.pick(1, 90), made.pick(1, 150), axis));
  }
  made.run(2, 2);
  for (const MatmulCase& one : all) expect_product(made, one);
}

// Sums positive numbers, where one chain of 16384 float additions would have an error of 4e-6.
TEST(CpuMatmulTest, DeepSumsKeepTheirDigits) {
  CpuCase made(11);
  const CpuCase::Fill uniform = [](std::mt19937_64& random) { return std::uniform_real_distribution<>(0, 1)(random); };
  constexpr int64_t kDepth = 16384, kColumns = 40;
  std::vector<MatmulStage> all;
  for (const int64_t rows : {1, 3, 7}) {
    for (const bool deep_adjacent : {false, true}) {
      MatmulStage body;
      body.a = made.input(ScalarType::f32, {1, rows, kDepth}, uniform);
      const Shape strides = deep_adjacent ? Shape{kDepth * kColumns, 1, kDepth} : Shape{};
      body.b = made.input(ScalarType::f32, {1, kDepth, kColumns}, uniform, strides);
      body.out = made.output(ScalarType::f32, {1, rows, kColumns});
      body.m = rows, body.n = kColumns, body.k = kDepth;
      made.stage(body, {{body.a, -1, false}, {body.b, 2, false}, {body.out, 2, true}}, kColumns);
      all.push_back(body);
    }
  }
  made.run(2);
  for (const MatmulStage& one : all) {
    for_each_index({one.m, one.n}, [&](const std::vector<int64_t>& at) {
      if (at[0] % 3 != 0 || at[1] % 13 != 0) return;
      double sum = 0;
      for (int64_t d = 0; d < kDepth; ++d) sum += made.get(one.a, {0, at[0], d}) * made.get(one.b, {0, d, at[1]});
      EXPECT_NEAR(made.get(one.out, {0, at[0], at[1]}) / sum, 1, 5e-7) << one.m << " rows, column " << at[1];
    });
  }
}

TEST(CpuMatmulTest, WorkersDoNotChangeBits) {
  std::vector<std::vector<std::vector<char>>> results;
  for (const int workers : worker_counts()) {
    CpuCase made(9);
    add_matmul(made, 1, 1, 203, 333, MatmulStage::Axis::columns);
    add_matmul(made, 1, 37, 70, 129, MatmulStage::Axis::rows);
    add_matmul(made, 1, 13, 131, 65, MatmulStage::Axis::columns);
    add_matmul(made, 5, 3, 17, 40, MatmulStage::Axis::batch);
    made.run(workers, 3);
    results.push_back(made.outputs());
  }
  for (size_t i = 1; i < results.size(); ++i) EXPECT_EQ(results[i], results[0]) << worker_counts()[i] << " workers";
}

}  // namespace cpu_matmul_test
}  // namespace ark::compiler::test
