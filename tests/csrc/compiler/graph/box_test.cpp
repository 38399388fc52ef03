// Compares regions with sets of bytes, on random views.
#include "compiler/graph/box.hpp"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "graph_builder.hpp"

namespace ark::compiler {
namespace {

class RandomViews {
 public:
  explicit RandomViews(uint64_t seed) : random_(seed) {}
  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }

  // A view of a dense tensor (permuted, sliced with steps, expanded, flipped), or one with arbitrary strides.
  Value view() {
    Value value;
    value.buffer = 0;
    value.type = std::array{ScalarType::f32, ScalarType::bf16, ScalarType::boolean}[pick(0, 2)];
    const int dims = pick(0, 4);
    int64_t stride = 1;
    for (int dim = 0; dim < dims; ++dim) {
      const int64_t length = pick(1, 6);
      const int64_t step = pick(1, 3) == 1 ? 2 : 1;
      const int64_t first = pick(0, static_cast<int>(length) - 1);
      value.offset += first * stride;
      value.shape.push_back((pick(first, length - 1) - first) / step + 1);
      value.strides.push_back(stride * step);
      if (pick(1, 8) == 1) value.strides.back() = pick(0, 7);  // expanded, or anything that as_strided allows
      stride *= length;
    }
    if (dims > 0 && pick(1, 6) == 1) {
      value.offset += value.strides[0] * (value.shape[0] - 1);
      value.strides[0] = -value.strides[0];
    }
    for (int dim = dims - 1; dim > 0; --dim) {
      const int other = pick(0, dim);
      std::swap(value.shape[dim], value.shape[other]);
      std::swap(value.strides[dim], value.strides[other]);
    }
    value.offset += pick(0, 10);
    return value;
  }

 private:
  std::mt19937_64 random_;
};

std::set<int64_t> bytes_of(const Value& value, int axis, int64_t low, int64_t high) {
  std::set<int64_t> found;
  std::vector<int64_t> first(value.shape.size(), 0);
  std::vector<int64_t> last = value.shape;
  if (axis >= 0) first[axis] = low, last[axis] = high;
  for (size_t dim = 0; dim < first.size(); ++dim) {
    if (first[dim] >= last[dim]) return found;
  }
  std::vector<int64_t> at = first;
  for (;;) {
    int64_t element = value.offset;
    for (size_t dim = 0; dim < at.size(); ++dim) element += at[dim] * value.strides[dim];
    for (int byte = 0; byte < size_of(value.type); ++byte) found.insert(element * size_of(value.type) + byte);
    size_t dim = at.size();
    while (dim > 0 && ++at[dim - 1] == last[dim - 1]) at[dim - 1] = first[dim - 1], --dim;
    if (dim == 0) return found;
  }
}

std::set<int64_t> bytes_of(const Box& region) {
  std::set<int64_t> found;
  each_piece(region, [&](int64_t offset, int64_t rows, int64_t stride) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t byte = 0; byte < region.width; ++byte) found.insert(offset + row * stride + byte);
    }
  });
  return found;
}

TEST(RegionTest, HasTheBytesOfTheView) {
  int twice = 0, said = 0;  // views that have a byte more than once, and of which that is said
  for (uint64_t seed = 1; seed <= 20000; ++seed) {
    const Value value = RandomViews(seed).view();
    const Box region = box_of(value);
    const std::set<int64_t> expected = bytes_of(value, -1, 0, 0);
    ASSERT_EQ(bytes_of(region), expected) << seed;
    ASSERT_EQ(region.offset, *expected.begin()) << seed;
    ASSERT_EQ(region.end(), *expected.rbegin() + 1) << seed;
    const bool once = static_cast<int64_t>(expected.size()) == value.elements() * size_of(value.type);
    ASSERT_TRUE(once || overlaps_itself(value)) << seed;
    twice += once ? 0 : 1;
    said += overlaps_itself(value) ? 1 : 0;
  }
  EXPECT_GT(twice, 200);
  EXPECT_GE(said, twice);
  EXPECT_LT(said, 1000);  // it may say so where it is not, but seldom
}

TEST(RegionTest, OfATileHasTheBytesOfItsIndices) {
  for (uint64_t seed = 1; seed <= 20000; ++seed) {
    RandomViews views(seed);
    Graph graph;
    Buffer buffer;
    buffer.bytes = 1 << 20;
    graph.add_buffer(buffer);
    const Value value = views.view();
    if (value.shape.empty()) continue;
    Access access;
    access.value = graph.add_value(value);
    access.axis = views.pick(0, static_cast<int>(value.shape.size()) - 1);
    const int64_t length = value.shape[access.axis];
    Stage stage;
    const int64_t times = views.pick(1, 3);
    const bool finer = views.pick(0, 1) == 1;  // tiles of several indices, or parts of one index
    stage.extent = finer ? length * times : length;
    const int64_t begin = views.pick(0, static_cast<int>(stage.extent) - 1);
    const int64_t end = views.pick(static_cast<int>(begin) + 1, static_cast<int>(stage.extent));
    const int64_t part = finer ? times : 1;
    ASSERT_EQ(bytes_of(box_of(graph, stage, access, begin, end)),
              bytes_of(value, access.axis, begin / part, (end + part - 1) / part))
        << seed;
  }
}

TEST(RegionTest, OverlapsExactlyWhereAByteIsShared) {
  int shared = 0, apart_though_mixed = 0;
  for (uint64_t seed = 1; seed <= 40000; ++seed) {
    RandomViews views(seed);
    const Value a = views.view();
    const Value b = views.view();
    const std::set<int64_t> of_a = bytes_of(a, -1, 0, 0);
    const std::set<int64_t> of_b = bytes_of(b, -1, 0, 0);
    const bool expected = std::any_of(of_a.begin(), of_a.end(), [&](int64_t byte) { return of_b.count(byte) > 0; });
    ASSERT_EQ(overlap(box_of(a), box_of(b)), expected) << seed;
    ASSERT_EQ(overlap(box_of(b), box_of(a)), expected) << seed;
    shared += expected;
    apart_though_mixed += !expected && *of_a.begin() <= *of_b.rbegin() && *of_b.begin() <= *of_a.rbegin();
  }
  EXPECT_GT(shared, 3000);
  EXPECT_GT(apart_though_mixed, 1000);
}

TEST(RegionTest, TellsPartsOfTensorsApart) {
  GraphBuilder builder;
  const int x = builder.input({3, 4, 8});
  const auto apart = [&](int a, int b) { return !overlap(builder.at(a), builder.at(b)); };
  for (int dim : {0, 1, 2}) {
    EXPECT_TRUE(apart(builder.slice(x, dim, 0, 1), builder.slice(x, dim, 1, 3))) << dim;
    EXPECT_FALSE(apart(builder.slice(x, dim, 0, 2), builder.slice(x, dim, 1, 3))) << dim;
  }
  EXPECT_TRUE(apart(builder.slice(x, 2, 0, 8, 2), builder.slice(x, 2, 1, 8, 2)));
  EXPECT_TRUE(apart(builder.transpose(builder.slice(x, 2, 0, 4)), builder.slice(x, 2, 4, 8)));
  EXPECT_TRUE(apart(x, builder.input({3, 4, 8})));
  EXPECT_TRUE(apart(x, builder.literal(1)));
}

// Every second element against every fourth of those between: more rows than are looked at one by one.
TEST(RegionTest, ManyRowsAreToldApartByResidues) {
  GraphBuilder builder;
  const int x = builder.input({100000});
  const Value even = builder.at(builder.slice(x, 0, 0, 100000, 2)), odd = builder.at(builder.slice(x, 0, 1, 100000, 4));
  EXPECT_FALSE(overlap(even, odd));
  EXPECT_TRUE(overlap(even, builder.at(builder.slice(x, 0, 2, 100000, 4))));
  EXPECT_TRUE(overlap(odd, builder.at(builder.slice(x, 0, 1, 100000, 3))));
}

TEST(RegionTest, CoversOnlyWhatItHas) {
  int covered = 0, of = 0;
  for (uint64_t seed = 1; seed <= 40000; ++seed) {
    RandomViews views(seed);
    const Value outer = views.view();
    Value inner = views.pick(1, 3) == 1 ? views.view() : outer;
    for (size_t dim = 0; dim < inner.shape.size(); ++dim) {  // a part of it
      const int64_t first = views.pick(0, static_cast<int>(inner.shape[dim]) - 1);
      inner.offset += first * inner.strides[dim];
      inner.shape[dim] = views.pick(1, static_cast<int>(inner.shape[dim] - first));
    }
    const std::set<int64_t> has = bytes_of(outer, -1, 0, 0);
    const std::set<int64_t> asked = bytes_of(inner, -1, 0, 0);
    const bool truly = std::includes(has.begin(), has.end(), asked.begin(), asked.end());
    const bool said = covers(box_of(outer), box_of(inner));
    ASSERT_TRUE(truly || !said) << seed;
    of += truly;
    covered += said;
  }
  EXPECT_GT(covered, of * 3 / 4) << of;  // it may say no, but not too often
}

// Seven dimensions that cannot be merged exceed what a region holds. It must then cover too much, never too little.
TEST(RegionTest, OfTooManyDimensionsIsLargerAndSaysSo) {
  Value value;
  value.buffer = 0;
  value.type = ScalarType::boolean;
  int64_t stride = 1;
  for (int dim = 0; dim < 8; ++dim) {
    value.shape.insert(value.shape.begin(), 2);
    value.strides.insert(value.strides.begin(), stride * 2 + dim);
    stride = stride * 2 + dim + 1;
  }
  const Box region = box_of(value);
  const std::set<int64_t> exact = bytes_of(value, -1, 0, 0);
  const std::set<int64_t> said = bytes_of(region);
  EXPECT_TRUE(std::includes(said.begin(), said.end(), exact.begin(), exact.end()));
  EXPECT_LE(region.depth, Box::most);
  EXPECT_EQ(region.exact, said == exact);
  EXPECT_FALSE(region.exact);
  EXPECT_FALSE(covers(region, region));
}

}  // namespace
}  // namespace ark::compiler
