// Tests gather and scatter of the CPU target: every type, any dimension, negative indices.
#include <gtest/gtest.h>

#include "compiler/fuse/row_program.hpp"

namespace ark::compiler::test {
namespace {

// Gather and scatter move elements of every type unchanged, along any dimension. Negative indices count from the end.
TEST(CpuLookupTest, EveryType) {
  CpuCase made(16);
  struct Try {
    int table, index, out, base, source, places;
    int dim;
  };
  std::vector<Try> all;
  for (const ScalarType type : kTypes)
    for (int dim = 0; dim < 2; ++dim) {
      Try one{};
      one.dim = dim;
      const int64_t size = dim == 0 ? 9 : 21;
      one.table = made.input(type, {9, 21}, CpuCase::integers(-50, 50), dim == 0 ? Shape{} : Shape{1, 9});
      one.index = made.input(dim == 0 ? ScalarType::i64 : ScalarType::i32, {4}, CpuCase::integers(-size, size - 1));
      one.out = made.output(type, dim == 0 ? Shape{4, 21} : Shape{9, 4});
      made.stage(GatherStage{one.table, {one.index}, one.out, dim, true},
                 {{one.table, dim == 0 ? -1 : 0, false}, {one.index, dim == 0 ? 0 : -1, false}, {one.out, 0, true}},
                 dim == 0 ? 4 : 9);
      one.base = made.input(type, {9, 21}, CpuCase::integers(-50, 50), {}, 0, true);
      one.source = made.input(type, dim == 0 ? Shape{3, 21} : Shape{9, 3}, CpuCase::integers(60, 99));
      one.places = made.input(ScalarType::i64, {3}, CpuCase::integers(0, 2));
      for (int64_t i = 0; i < 3; ++i) made.set(one.places, {i}, static_cast<double>(i * 2 + 1 - (i == 1 ? size : 0)));
      // Tiles cut the dimension that is not indexed.
      made.stage(ScatterStage{one.base, one.places, one.source, dim, true},
                 {{one.base, 1 - dim, true}, {one.places, -1, false}, {one.source, 1 - dim, false}}, dim == 0 ? 21 : 9);
      all.push_back(one);
    }
  CpuLoop loop(made.plan(2), cpu_compiler());
  made.run(loop);
  for (const Try& one : all) {
    const bool rows = one.dim == 0;
    const auto from_the_end = [&](double i) { return static_cast<int64_t>(i < 0 ? i + (rows ? 9 : 21) : i); };
    for_each_index(rows ? Shape{4, 21} : Shape{9, 4}, [&](const std::vector<int64_t>& at) {
      const int64_t i = from_the_end(made.get(one.index, {at[rows ? 0 : 1]}));
      EXPECT_EQ(made.get(one.out, at), made.get(one.table, rows ? Shape{i, at[1]} : Shape{at[0], i}));
    });
    for_each_index(rows ? Shape{3, 21} : Shape{9, 3}, [&](const std::vector<int64_t>& at) {
      const int64_t i = from_the_end(made.get(one.places, {at[rows ? 0 : 1]}));
      EXPECT_EQ(made.get(one.base, rows ? Shape{i, at[1]} : Shape{at[0], i}), made.get(one.source, at));
    });
    const Shape untouched = rows ? Shape{0, 7} : Shape{7, 0};
    EXPECT_LT(made.get(one.base, untouched), 60);
  }
}

}  // namespace
}  // namespace ark::compiler::test
