// Compares the CPU target's attention with double: types, odd lengths, masks, causal, shared heads, strides and fully
// masked rows. Blocks that the mask excludes must not be read.
#include <gtest/gtest.h>

#include <limits>

#include "compiler/emit/cpu_case.hpp"

namespace ark::compiler::test {
namespace cpu_attention_test {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
constexpr ScalarType kFloats[] = {ScalarType::f32, ScalarType::bf16, ScalarType::f16};

struct AttentionCase {
  AttentionStage body;
  int64_t batch, heads, kv_heads, queries, keys, columns;
};

AttentionCase add_attention(CpuCase& made, int64_t batch, int64_t kv_heads, int64_t group, int64_t queries,
                            int64_t keys, int64_t columns, int mask_kind, bool causal, bool by_batch = false) {
  AttentionCase one{{}, batch, kv_heads * group, kv_heads, queries, keys, columns};
  const ScalarType type = kFloats[made.pick(0, 2)];
  // Sometimes [B, H, T, D] with the strides of a transposed [B, T, H, D].
  auto strides = [&](int64_t heads, int64_t rows) {
    return made.pick(0, 1) == 0 ? Shape{} : Shape{rows * heads * columns, columns, heads * columns, 1};
  };
  AttentionStage& s = one.body;
  s.q = made.input(type, {batch, one.heads, queries, columns}, CpuCase::normal(), strides(one.heads, queries));
  s.k = made.input(type, {batch, kv_heads, keys, columns}, CpuCase::normal(), strides(kv_heads, keys));
  s.v = made.input(type, {batch, kv_heads, keys, columns}, CpuCase::normal(), strides(kv_heads, keys));
  s.out = made.output(type, {batch, one.heads, queries, columns}, strides(one.heads, queries));
  s.scale = 1 / std::sqrt(static_cast<double>(columns));
  s.causal = causal;
  std::vector<Access> accesses{{s.q, by_batch ? 0 : 1, false},
                               {s.k, by_batch ? 0 : 1, false},
                               {s.v, by_batch ? 0 : 1, false},
                               {s.out, by_batch ? 0 : 1, true}};
  if (mask_kind > 0) {
    Shape shape{made.pick(0, 1) == 0 ? 1 : batch, 1, queries, keys};
    if (mask_kind == 1)
      s.mask = made.input(ScalarType::boolean, shape, CpuCase::integers(0, 2));
    else if (mask_kind == 2)
      s.mask = made.input(ScalarType::f32, shape, CpuCase::normal());
    else
      s.mask = made.input(ScalarType::f32, {batch, one.heads, queries, keys}, [](std::mt19937_64& random) {
        return random() % 3 == 0 ? kMinusInfinity : static_cast<double>(random() % 5);
      });
    accesses.push_back({s.mask, mask_kind == 3 && !by_batch ? 1 : -1, false});
  }
  made.stage(s, accesses, by_batch ? batch : kv_heads);
  return one;
}

double mask_at(CpuCase& made, const AttentionStage& s, const std::vector<int64_t>& at) {
  if (s.mask < 0) return 0;
  const Value& mask = made.graph.values()[static_cast<size_t>(s.mask)];
  std::vector<int64_t> index = at;
  for (size_t d = 0; d < 4; ++d)
    if (mask.shape[d] == 1) index[d] = 0;
  const double x = made.get(s.mask, index);
  return mask.type == ScalarType::boolean ? (x != 0 ? 0 : kMinusInfinity) : x;
}

void expect_attention(CpuCase& made, const AttentionCase& one) {
  const AttentionStage& s = one.body;
  const ScalarType type = made.graph.values()[static_cast<size_t>(s.out)].type;
  int64_t wrong = 0;
  for_each_index({one.batch, one.heads, one.queries}, [&](const std::vector<int64_t>& row) {
    const int64_t b = row[0], h = row[1], t = row[2], kv = h / (one.heads / one.kv_heads);
    std::vector<double> weights;
    double total = 0;
    for (int64_t j = 0; j < one.keys; ++j) {
      double score = mask_at(made, s, {b, h, t, j});
      if (s.causal && j > t) score = kMinusInfinity;
      if (score != kMinusInfinity) {
        double dot = 0;
        for (int64_t d = 0; d < one.columns; ++d) dot += made.get(s.q, {b, h, t, d}) * made.get(s.k, {b, kv, j, d});
        score += dot * s.scale;
      }
      weights.push_back(std::exp(score));
      total += weights.back();
    }
    for (int64_t d = 0; d < one.columns; ++d) {
      double sum = 0;
      for (int64_t j = 0; j < one.keys; ++j)
        if (weights[static_cast<size_t>(j)] != 0)
          sum += weights[static_cast<size_t>(j)] / total * made.get(s.v, {b, kv, j, d});
      const double got = made.get(s.out, {b, h, t, d});
      if (!(std::abs(got - sum) <= 2e-5 + 2 * epsilon_of(type) * std::abs(sum)) && ++wrong < 4)
        ADD_FAILURE() << name_of(type) << " keys " << one.keys << " columns " << one.columns << " at " << b << ", " << h
                      << ", " << t << ", " << d << ": " << got << ", not " << sum;
    }
  });
  EXPECT_EQ(wrong, 0);
}

TEST(CpuAttentionTest, RandomAgainstDouble) {
  CpuCase made(3);
  std::vector<AttentionCase> all;
  const int64_t columns[] = {8, 16, 40, 64};
  for (int i = 0; i < ark::test::cases(24); ++i)
    all.push_back(add_attention(made, made.pick(1, 2), made.pick(1, 3), made.pick(1, 4), made.pick(1, 20),
                                made.pick(1, 200), columns[made.pick(0, 3)], i % 4, made.pick(0, 2) == 0, i % 5 == 0));
  made.run(2, 2);
  for (const AttentionCase& one : all) expect_attention(made, one);
}

TEST(CpuAttentionTest, WorkersDoNotChangeBits) {
  std::vector<std::vector<std::vector<char>>> results;
  for (const int workers : worker_counts()) {
    CpuCase made(5);
    add_attention(made, 2, 3, 2, 7, 150, 40, 1, false);
    add_attention(made, 3, 1, 4, 1, 333, 64, 3, false, true);
    made.run(workers, 2);
    results.push_back(made.outputs());
  }
  for (size_t i = 1; i < results.size(); ++i) EXPECT_EQ(results[i], results[0]);
}

TEST(CpuAttentionTest, RowThatMayLookAtNothingIsZero) {
  CpuCase made(6);
  const AttentionCase one = add_attention(made, 1, 1, 2, 3, 70, 16, 1, false);
  for (int64_t j = 0; j < 70; ++j) made.set(one.body.mask, {0, 0, 1, j}, 0);
  made.run(1);
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t d = 0; d < 16; ++d) EXPECT_EQ(made.get(one.body.out, {0, h, 1, d}), 0);
}

// Data past the used length can be anything, in whole blocks and in the last partial block.
TEST(CpuAttentionTest, NothingPastTheLengthInUseMatters) {
  CpuCase made(8);
  const AttentionCase one = add_attention(made, 1, 2, 2, 1, 300, 64, 1, false);
  const int64_t used = 77;
  for (int64_t j = 0; j < 300; ++j) made.set(one.body.mask, {0, 0, 0, j}, j < used ? 1 : 0);
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t j = used; j < 300; ++j)
      for (int64_t d = 0; d < 64; ++d)
        for (const int cache : {one.body.k, one.body.v})
          made.set(cache, {0, h, j, d}, std::numeric_limits<double>::quiet_NaN());
  made.run(2);
  expect_attention(made, one);
}

}  // namespace cpu_attention_test
}  // namespace ark::compiler::test
