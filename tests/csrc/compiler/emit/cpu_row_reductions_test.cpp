// Tests the CPU target's row programs with reductions: one after the other, over several dimensions, and in place.
#include <gtest/gtest.h>

#include <limits>
#include "compiler/fuse/row_program.hpp"

namespace ark::compiler::test {
namespace {

// Softmax and the mean square of its logarithm: three dependent reductions that keep expensive registers.
TEST(CpuRowReductionsTest, ReductionsBehindReductions) {
  CpuCase made(13);
  const int64_t rows = 7, columns = 83;
  const int x = made.input(ScalarType::f32, {rows, columns}, CpuCase::normal(3));
  const int y = made.output(ScalarType::f32, {rows, columns}), z = made.output(ScalarType::f32, {rows, 1});
  const int where = made.output(ScalarType::i64, {rows, 1});
  Program program(made, {rows, columns}, 1, 0);
  const auto f32 = ScalarType::f32;
  const int in = program.load(x);
  const int most = program.reduce("amax", in, f32);
  const int power = program.op("exp", {program.op("sub", {in, most}, f32)}, f32);
  const int share = program.op("div", {power, program.reduce("sum", power, f32)}, f32);
  program.store(y, share);
  const int logarithm = program.op("log", {share}, f32);
  const int mean = program.reduce("mean", program.op("mul", {logarithm, logarithm}, f32), f32);
  program.store(z, program.op("sqrt", {mean}, f32, true), true);
  program.store(where, program.reduce("argmax", share, ScalarType::i64), true);
  program.done();
  // One row has an element masked with -inf, another row has only -inf.
  made.set(x, {2, 5}, -std::numeric_limits<double>::infinity());
  for (int64_t c = 0; c < columns; ++c) made.set(x, {4, c}, -std::numeric_limits<double>::infinity());
  CpuLoop loop(made.plan(3), cpu_compiler());
  made.run(loop);
  for (int64_t r = 0; r < rows; ++r) {
    double greatest = -HUGE_VAL, sum = 0, squares = 0;
    int64_t at = 0;
    for (int64_t c = 0; c < columns; ++c)
      if (made.get(x, {r, c}) > greatest) greatest = made.get(x, {r, c}), at = c;
    for (int64_t c = 0; c < columns; ++c) sum += std::exp(made.get(x, {r, c}) - greatest);
    for (int64_t c = 0; c < columns; ++c) {
      const double share = std::exp(made.get(x, {r, c}) - greatest) / sum;
      EXPECT_TRUE(r == 4 ? std::isnan(made.get(y, {r, c})) : std::abs(made.get(y, {r, c}) - share) <= 1e-6 * share)
          << r << ", " << c;
      squares += std::log(share) * std::log(share) / static_cast<double>(columns);
    }
    if (r == 4) continue;
    EXPECT_EQ(made.get(where, {r, 0}), static_cast<double>(at));
    if (r == 2)
      EXPECT_EQ(made.get(z, {r, 0}), HUGE_VAL);
    else
      EXPECT_NEAR(made.get(z, {r, 0}), std::sqrt(squares), 1e-5 * std::sqrt(squares));
  }
}

// The reduced columns span several transposed dimensions. The vector runs along the contiguous one.
TEST(CpuRowReductionsTest, ReductionOverSeveralDimensions) {
  CpuCase made(14);
  const Shape shape{4, 6, 35};
  const int x = made.input(ScalarType::f32, shape, CpuCase::normal(), {6 * 35, 1, 6});
  const int y = made.output(ScalarType::f32, {4, 1, 1});
  Program program(made, shape, 2, 0);
  program.store(y, program.reduce("mean", program.load(x), ScalarType::f32), true);
  program.done();
  CpuLoop loop(made.plan(2), cpu_compiler());
  made.run(loop);
  for (int64_t r = 0; r < 4; ++r) {
    double sum = 0;
    for_each_index({6, 35}, [&](const std::vector<int64_t>& at) { sum += made.get(x, {r, at[0], at[1]}); });
    EXPECT_NEAR(made.get(y, {r, 0, 0}), sum / (6 * 35), 1e-6);
  }
}

// x -= mean(x), written over x: the second pass must not read what the first one has written.
TEST(CpuRowReductionsTest, InPlace) {
  CpuCase made(15);
  const int64_t rows = 3, columns = 50;
  const int x = made.input(ScalarType::f32, {rows, columns}, CpuCase::normal(), {}, 0, true);
  Program program(made, {rows, columns}, 1, 0);
  const int in = program.load(x);
  program.store(x, program.op("sub", {in, program.reduce("mean", in, ScalarType::f32)}, ScalarType::f32));
  program.done();
  std::vector<double> before;
  for_each_index({rows, columns}, [&](const std::vector<int64_t>& at) { before.push_back(made.get(x, at)); });
  CpuLoop loop(made.plan(2), cpu_compiler());
  made.run(loop);
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (int64_t c = 0; c < columns; ++c) sum += before[static_cast<size_t>(r * columns + c)];
    for (int64_t c = 0; c < columns; ++c)
      EXPECT_NEAR(made.get(x, {r, c}), before[static_cast<size_t>(r * columns + c)] - sum / columns, 1e-6);
  }
}

}  // namespace
}  // namespace ark::compiler::test
