// Tests make_stages(): operators that belong together form one stage, and stages run in random tiles compute the same
// as the nodes.
#include "compiler/graph/stage.hpp"

#include <gtest/gtest.h>

#include <random>

#include "compiler/graph/random_graph.hpp"
#include "stage_case.hpp"
#include "util/error.hpp"

namespace ark::compiler {
namespace {

std::vector<Stage> stages_of(GraphBuilder& builder) {
  expect_same(
      builder.graph, [&](Memory& memory) { fill_inputs(memory, builder.graph); }, 1);
  return make_stages(builder.graph);
}

int rms_norm(GraphBuilder& builder, int x, int weight) {
  const int wide = builder.pointwise("cast", {x});
  const int square = builder.pointwise("mul", {wide, wide});
  const int mean = builder.reduce("mean", square, {-1});
  const int root = builder.pointwise("rsqrt", {builder.pointwise("add", {mean, builder.literal(1e-5)})});
  const int normal = builder.pointwise("cast", {builder.pointwise("mul", {wide, root})}, ScalarType::bf16);
  return builder.pointwise("mul", {normal, weight}, ScalarType::bf16);
}

TEST(Stages, RmsNormIsOneAndOfOneRowReplicable) {
  for (int64_t rows : {1, 5}) {
    GraphBuilder builder;
    const int x = builder.input({1, rows, 64}, ScalarType::bf16), weight = builder.parameter({64}, ScalarType::bf16);
    const int w = builder.parameter({64, 64}, ScalarType::bf16);
    const int normal = rms_norm(builder, x, weight);
    builder.into(builder.output({rows, 64}, ScalarType::bf16), "matmul",
                 {builder.reshape(normal, {rows, 64}), builder.transpose(w)});
    const auto stages = stages_of(builder);
    ASSERT_EQ(stages.size(), 2u);
    EXPECT_EQ(stages[0].name, "rms_norm");
    EXPECT_EQ(stages[0].extent, rows);
    EXPECT_TRUE(stages[0].replicable);
    const auto& program = std::get<RowProgram>(stages[0].body);
    EXPECT_EQ(program.inner, 1);
    int stores = 0;
    for (const auto& instruction : program.code) {
      stores += instruction.kind == RowProgram::Instruction::Kind::store ? 1 : 0;
    }
    EXPECT_EQ(stores, 1);
    EXPECT_EQ(std::get<MatmulStage>(stages[1].body).axis, MatmulStage::Axis::columns);
    EXPECT_EQ(stages[1].extent, 64);
    EXPECT_EQ(stages[1].grain, 32);
  }
}

TEST(Stages, ResidualJoinsTheNormAfterIt) {
  GraphBuilder builder;
  const int x = builder.input({2, 3, 64}, ScalarType::bf16), weight = builder.parameter({64}, ScalarType::bf16);
  const int y = builder.input({6, 64}, ScalarType::bf16);
  const int sum = builder.pointwise("add", {x, builder.reshape(y, {2, 3, 64})}, ScalarType::bf16);
  builder.copy_out(rms_norm(builder, sum, weight));
  builder.copy_out(sum);
  const auto stages = stages_of(builder);
  ASSERT_EQ(stages.size(), 1u);
  EXPECT_FALSE(stages[0].replicable);  // it writes results of the call
  // Registers that are stored are rounded, the others stay float32.
  int rounded = 0;
  for (const auto& instruction : std::get<RowProgram>(stages[0].body).code) {
    if (instruction.kind == RowProgram::Instruction::Kind::op && instruction.type == ScalarType::bf16) ++rounded;
  }
  EXPECT_EQ(rounded, 2);
}

TEST(Stages, LayerNormIsOne) {
  GraphBuilder builder;
  const int x = builder.input({2, 5, 48}), weight = builder.parameter({48}), bias = builder.parameter({48});
  const int mean = builder.reduce("mean", x, {2});
  const int centred = builder.pointwise("sub", {x, mean});
  const int variance = builder.reduce("mean", builder.pointwise("mul", {centred, centred}), {2});
  const int root = builder.pointwise("rsqrt", {builder.pointwise("add", {variance, builder.literal(1e-5)})});
  const int again = builder.pointwise("sub", {x, mean});
  const int normal = builder.pointwise("mul", {again, root});
  builder.copy_out(builder.pointwise("add", {builder.pointwise("mul", {normal, weight}), bias}));
  const auto stages = stages_of(builder);
  ASSERT_EQ(stages.size(), 1u);
  EXPECT_EQ(stages[0].name, "layer_norm");
  EXPECT_EQ(stages[0].extent, 10);  // both outer dimensions are merged
}

TEST(Stages, SoftmaxIsOneAlongAnyDimension) {
  for (int64_t dim : {0, 1, 2}) {
    GraphBuilder builder;
    const int x = builder.input({4, 5, 6});
    const int shifted = builder.pointwise("sub", {x, builder.reduce("amax", x, {dim})});
    const int exponential = builder.pointwise("exp", {shifted});
    const int sum = builder.reduce("sum", exponential, {dim});
    builder.copy_out(builder.pointwise("div", {exponential, sum}));
    const auto stages = stages_of(builder);
    ASSERT_EQ(stages.size(), 1u) << dim;
    EXPECT_EQ(stages[0].name, "softmax");
  }
}

TEST(Stages, SwigluIsOneCutByColumns) {
  GraphBuilder builder;
  const int gate = builder.input({1, 1024}, ScalarType::bf16), up = builder.input({1, 1024}, ScalarType::bf16);
  const int x = builder.pointwise("cast", {gate});
  const int denominator =
      builder.pointwise("add", {builder.pointwise("exp", {builder.pointwise("neg", {x})}), builder.literal(1)});
  const int silu = builder.pointwise("cast", {builder.pointwise("div", {x, denominator})}, ScalarType::bf16);
  builder.copy_out(builder.pointwise("mul", {silu, up}, ScalarType::bf16));
  const auto stages = stages_of(builder);
  ASSERT_EQ(stages.size(), 1u);
  EXPECT_EQ(stages[0].name, "swiglu");
  EXPECT_EQ(stages[0].extent, 1024);
  EXPECT_EQ(stages[0].grain, 32);
  for (const Access& access : stages[0].accesses) EXPECT_GE(access.axis, 0);
}

TEST(Stages, MaskIsComputedFromPositionsInPlace) {
  GraphBuilder builder;
  const int position = builder.input({1}, ScalarType::i64);
  const int keys = builder.into(builder.temporary({40}, ScalarType::i64), "iota", {});
  const int visible = builder.pointwise("le", {builder.unsqueeze(keys, 0), builder.unsqueeze(position, 1)});
  builder.copy_out(builder.pointwise("where", {visible, builder.literal(0), builder.literal(-1e30)}));
  const auto stages = stages_of(builder);
  ASSERT_EQ(stages.size(), 1u);
  EXPECT_EQ(stages[0].name, "mask");
}

TEST(Stages, RotaryIsOneThroughItsConcatenation) {
  for (int64_t positions : {1, 3}) {
    GraphBuilder builder;
    const auto bf16 = ScalarType::bf16;
    const int projected = builder.input({1, positions, 4 * 16}, bf16);
    const int x = builder.permute(builder.reshape(projected, {1, positions, 4, 16}), {0, 2, 1, 3});
    const int cosine = builder.input({1, positions, 16}, bf16), sine = builder.input({1, positions, 16}, bf16);
    const int straight = builder.pointwise("mul", {x, builder.unsqueeze(cosine, 1)}, bf16);
    const int rotated = builder.temporary({1, 4, positions, 16}, bf16);
    builder.into(builder.slice(rotated, 3, 0, 8), "neg", {builder.slice(x, 3, 8, 16)});
    builder.into(builder.slice(rotated, 3, 8, 16), "copy", {builder.slice(x, 3, 0, 8)});
    const int crossed = builder.pointwise("mul", {rotated, builder.unsqueeze(sine, 1)}, bf16);
    builder.copy_out(builder.pointwise("add", {straight, crossed}, bf16));
    const auto stages = stages_of(builder);
    ASSERT_EQ(stages.size(), 1u);
    EXPECT_EQ(stages[0].name, "rotary");
    EXPECT_EQ(stages[0].extent, 4);
  }
}

TEST(Stages, WriteIntoCacheComesBeforeAttention) {
  GraphBuilder builder;
  const int cache = builder.input({1, 2, 8, 4}, ScalarType::f32, true), index = builder.input({1}, ScalarType::i64);
  const int k = builder.input({1, 2, 1, 4}), q = builder.input({1, 4, 1, 4});
  const int old = builder.pointwise("mul", {cache, builder.literal(2)});  // reads the old content
  builder.into(cache, "scatter", {cache, index, k}, {{"dim", int64_t{2}}});
  builder.into(builder.output({1, 4, 1, 4}), "attention", {q, cache, cache}, {{"scale", 0.5}});
  builder.copy_out(old);
  expect_same(
      builder.graph,
      [&](Memory& memory) {
        fill_inputs(memory, builder.graph);
        for (double& cell : memory.cells[1]) cell = 5;
      },
      3);
  const auto stages = make_stages(builder.graph);
  ASSERT_EQ(stages.size(), 3u);
  EXPECT_EQ(stages[0].kind, "rows");
  EXPECT_EQ(stages[1].kind, "scatter");
  EXPECT_EQ(stages[1].extent, 2);
  EXPECT_EQ(stages[2].kind, "attention");
  EXPECT_EQ(stages[2].extent, 2);
}

// If nothing else uses it, a decoding step's new entry for the cache is computed directly into the cache.
TEST(Stages, KeysGoStraightIntoTheCache) {
  enum class Case { plain, wrapped, by_halves, two_positions, read_again, cache_read, asked_between };
  for (const Case one : {Case::plain, Case::wrapped, Case::by_halves, Case::two_positions, Case::read_again,
                         Case::cache_read, Case::asked_between}) {
    GraphBuilder builder;
    const int64_t positions = one == Case::two_positions ? 2 : 1;
    const int cache = builder.input({1, 3, 8, 4}, ScalarType::f32, true);
    const int index = builder.input({positions}, ScalarType::i64);
    const int projected = builder.input({1, positions, 12});
    int x = builder.permute(builder.reshape(projected, {1, positions, 3, 4}), {0, 2, 1, 3});
    if (one == Case::cache_read) x = builder.pointwise("add", {x, builder.slice(cache, 2, 5, 6)});
    const int keys = builder.temporary({1, 3, positions, 4});
    if (one == Case::by_halves) {
      const int turned = builder.temporary({1, 3, positions, 4});
      builder.into(builder.slice(turned, 3, 0, 2), "neg", {builder.slice(x, 3, 2, 4)});
      builder.into(builder.slice(turned, 3, 2, 4), "copy", {builder.slice(x, 3, 0, 2)});
      builder.into(keys, "add", {x, turned});
    } else {
      builder.into(keys, "mul", {x, builder.input({4})});
    }
    const int matrix = builder.input({1, 3, 4, 2});
    const int product = one == Case::asked_between ? builder.matmul(keys, matrix) : -1;
    builder.into(cache, "scatter", {cache, index, keys}, {{"dim", int64_t{2}}, {"wrap", one == Case::wrapped}});
    if (one == Case::read_again) builder.copy_out(builder.matmul(keys, matrix));
    if (product >= 0) builder.copy_out(product);
    expect_same(
        builder.graph,
        [&](Memory& memory) {
          fill_inputs(memory, builder.graph);
          for (size_t i = 0; i < memory.cells[1].size(); ++i)
            memory.cells[1][i] = one == Case::wrapped ? -3 : 5 - static_cast<double>(i / 8);
        },
        3);
    const auto stages = stages_for(builder.graph, 1);
    const bool fused = one == Case::plain || one == Case::wrapped || one == Case::by_halves;
    const auto scatters = std::count_if(stages.begin(), stages.end(), [](const Stage& stage) {
      return std::holds_alternative<ScatterStage>(stage.body);
    });
    EXPECT_EQ(scatters, fused ? 0 : 1) << static_cast<int>(one);
    if (!fused) continue;
    ASSERT_EQ(stages.size(), 1u);
    EXPECT_EQ(stages[0].extent, 3);
    EXPECT_FALSE(stages[0].replicable);
  }
}

// On a GPU: 2 key heads for 12 workers are split into blocks of query rows, none too small. Where later rows attend to
// more positions, they come first.
TEST(Stages, AttentionOverManyRowsIsSplit) {
  struct Case {
    int64_t queries, keys;
    bool causal;
    int mask;  // 1: one row for all, 2: one row for each
    int workers;
    std::vector<int64_t> rows;
  };
  for (const Case& one :
       {Case{200, 40, true, 0, 12, {72, 64, 64}}, Case{100, 100, false, 2, 12, {36, 32, 32}},
        Case{100, 30, true, 1, 4, {36, 64}}, Case{30, 30, true, 0, 12, {30}}, Case{300, 10, false, 0, 3, {300}}}) {
    GraphBuilder builder;
    const int q = builder.input({1, 4, one.queries, 4}), k = builder.input({1, 2, one.keys, 4});
    std::vector<int> inputs = {q, k, builder.input({1, 2, one.keys, 4})};
    if (one.mask > 0) inputs.push_back(builder.input({1, 1, one.mask == 1 ? 1 : one.queries, one.keys}));
    builder.into(builder.output({1, 4, one.queries, 4}), "attention", inputs, {{"scale", 0.5}, {"causal", one.causal}});
    expect_same(
        builder.graph, [&](Memory& memory) { fill_inputs(memory, builder.graph); }, 1, one.workers);
    const auto stages = stages_for(builder.graph, one.workers);
    std::vector<int64_t> rows;
    for (const Stage& stage : stages) rows.push_back(builder.at(std::get<AttentionStage>(stage.body).q).shape[2]);
    EXPECT_EQ(rows, one.rows);
  }
}

// On a GPU: heads of a batch, which are not adjacent in memory, are parts of their own where tiles cut the batch.
TEST(Stages, AttentionOfABatchIsSplit) {
  struct Case {
    int64_t batch, heads, queries;
    bool causal;
    int workers;
    size_t parts, blocks;
  };
  for (const Case& one :
       {Case{3, 2, 70, false, 24, 2, 1}, Case{2, 3, 70, true, 24, 2, 1}, Case{5, 4, 140, true, 16, 4, 1},
        Case{3, 6, 20, false, 6, 1, 1}, Case{2, 2, 300, false, 40, 2, 5}}) {
    GraphBuilder builder;
    const auto operand = [&] {
      const int rows = builder.input({one.batch, one.queries, one.heads, 64}, ScalarType::f16);
      return builder.view(rows, {one.batch, one.heads, one.queries, 64},
                          {one.queries * one.heads * 64, 64, one.heads * 64, 1});
    };
    const std::vector<int> inputs = {operand(), operand(), operand()};
    builder.into(builder.output({one.batch, one.heads, one.queries, 64}, ScalarType::f16), "attention", inputs,
                 {{"scale", 0.125}, {"causal", one.causal}});
    if (one.queries < 100)
      expect_same(
          builder.graph, [&](Memory& memory) { fill_inputs(memory, builder.graph); }, 1, one.workers);
    const auto stages = stages_for(builder.graph, one.workers);
    EXPECT_EQ(stages.size(), one.parts * one.blocks) << one.batch << " " << one.heads << " " << one.queries;
    double flops = 0;
    for (const Stage& stage : stages) flops += stage.flops;
    const auto scores = static_cast<double>(one.batch * one.heads * one.queries * one.queries);
    EXPECT_NEAR(flops, 4 * scores * 64 * (one.causal ? 0.5 : 1), 1e-6 * flops);
  }
}

// On a GPU: few rows, but so many positions that 2 key heads would leave workers idle.
TEST(Stages, AttentionOfFewRowsIsSplitByPositions) {
  struct Case {
    int64_t batch, heads, queries, positions;
    int mask;  // 1: one row for all, 2: one row for each
    int workers;
    std::vector<int64_t> parts;
  };
  for (const Case& one : {Case{1, 4, 1, 700, 1, 12, {256, 256, 188}}, Case{1, 2, 3, 1100, 2, 4, {768, 332}},
                          Case{2, 4, 1, 300, 0, 8, {256, 44}}, Case{1, 4, 9, 700, 1, 12, {700}},
                          Case{1, 4, 1, 256, 0, 12, {256}}, Case{1, 4, 1, 700, 0, 3, {700}}}) {
    GraphBuilder builder;
    const int q = builder.input({one.batch, one.heads, one.queries, 4});
    const int k = builder.input({one.batch, 2, one.positions, 4});
    std::vector<int> inputs = {q, k, builder.input({one.batch, 2, one.positions, 4})};
    if (one.mask > 0)
      inputs.push_back(builder.input({1, 1, one.mask == 1 ? 1 : one.queries, one.positions}, ScalarType::boolean));
    builder.into(builder.output({one.batch, one.heads, one.queries, 4}), "attention", inputs, {{"scale", 0.5}});
    expect_same(
        builder.graph,
        [&](Memory& memory) {
          fill_inputs(memory, builder.graph);
          if (one.mask > 0)  // the last part is masked
            for (size_t i = 0; i < memory.cells[3].size(); ++i)
              memory.cells[3][i] = static_cast<int64_t>(i) % one.positions < 250 && i % 3 != 0 ? 1 : 0;
        },
        1, one.workers);
    std::vector<int64_t> parts;
    const auto stages = stages_for(builder.graph, one.workers);
    for (const Stage& stage : stages)
      if (const auto* part = std::get_if<AttentionStage>(&stage.body)) parts.push_back(builder.at(part->k).shape[2]);
    EXPECT_EQ(parts, one.parts);
    EXPECT_EQ(std::holds_alternative<CombineStage>(stages.back().body), parts.size() > 1 && one.queries < 9);
  }
}

// On a GPU: a second matrix larger than half the cache is read once, by bands of columns for all rows.
TEST(Stages, ProductsOfLargeMatricesAreCutIntoBands) {
  constexpr int64_t kRows = 1100, kColumns = 9000, kDepth = 2048;
  constexpr int kWorkers = 16;
  GraphBuilder builder;
  const int a = builder.input({kRows, kDepth}, ScalarType::bf16);
  const int b = builder.transpose(builder.parameter({kColumns, kDepth}, ScalarType::bf16));
  builder.copy_out(builder.matmul(a, b, builder.parameter({kColumns}, ScalarType::bf16), ScalarType::bf16));
  const auto stages = stages_for(builder.graph, kWorkers);
  std::vector<std::pair<int64_t, int64_t>> begins;  // column and row
  int64_t elements = 0;
  double flops = 0;
  for (const Stage& stage : stages) {
    const auto& product = std::get<MatmulStage>(stage.body);
    EXPECT_EQ(product.tile_rows * product.tile_columns, 256 * 128);
    EXPECT_EQ(stage.extent, product.n);
    const int64_t row = builder.at(product.a).offset / kDepth, column = builder.at(product.b).offset / kDepth;
    EXPECT_EQ(builder.at(product.out).offset, row * kColumns + column);
    EXPECT_EQ(builder.at(product.bias).offset, column);
    begins.emplace_back(column, row);
    elements += product.m * product.n;
    flops += stage.flops;
  }
  EXPECT_TRUE(std::is_sorted(begins.begin(), begins.end()));
  EXPECT_EQ(begins[1].first, 0) << "the next block of rows has the same columns";
  EXPECT_EQ(elements, kRows * kColumns);
  EXPECT_NEAR(flops, 2.0 * kRows * kColumns * kDepth, 1e-6 * flops);
}

// On a GPU: few rows are cut by columns as finely as the kernel allows; many rows into even blocks, each by column
// tiles.
TEST(Stages, ProductsAreCutForAGpu) {
  struct Case {
    int64_t m, n;
    bool along_depth, bias;
    std::vector<int64_t> rows;
    int64_t grain;
  };
  for (const Case& one :
       {Case{1, 200, true, true, {1}, 8}, Case{16, 96, false, false, {16}, 32}, Case{17, 40, true, true, {17}, 32},
        Case{384, 128, true, true, {128, 128, 128}, 64}, Case{300, 70, false, false, {96, 104, 100}, 64}}) {
    GraphBuilder builder;
    const int a = builder.input({one.m, 12});
    int b = builder.input(one.along_depth ? Shape{one.n, 12} : Shape{12, one.n});
    if (one.along_depth) b = builder.view(b, {12, one.n}, {1, 12});
    std::vector<int> inputs = {a, b};
    if (one.bias) inputs.push_back(builder.input({one.n}));
    builder.into(builder.output({one.m, one.n}), "matmul", inputs, {});
    expect_same(
        builder.graph, [&](Memory& memory) { fill_inputs(memory, builder.graph); }, 1, 6);
    const auto stages = stages_for(builder.graph, 6);
    std::vector<int64_t> rows;
    for (const Stage& stage : stages) {
      rows.push_back(std::get<MatmulStage>(stage.body).m);
      EXPECT_EQ(stage.extent, one.n);
      EXPECT_EQ(stage.grain, one.grain);
    }
    EXPECT_EQ(rows, one.rows);
  }
}

// An activation joins the product if nothing else reads the product and there are many rows.
TEST(Stages, ProductsAreFinishedForAGpu) {
  struct Case {
    int64_t m;
    bool read_twice, halves, with_other, early_reader;
    size_t rows;  // stages that are row programs
  };
  for (const Case& one : {Case{64, false, false, false, false, 0}, Case{64, false, true, false, false, 0},
                          Case{16, false, false, false, false, 1}, Case{64, true, false, false, false, 1},
                          Case{64, false, false, true, false, 1}, Case{64, false, false, false, true, 2}}) {
    GraphBuilder builder;
    const ScalarType type = one.halves ? ScalarType::f16 : ScalarType::f32;
    const int a = builder.input({one.m, 12}, type), b = builder.input({12, 24}, type);
    const int old = builder.input({2, one.m / 2, 24}, type, true);
    const int made = builder.matmul(a, b, builder.input({24}, type), type);
    const int split = builder.reshape(made, {2, one.m / 2, 24});
    int x = builder.pointwise("mul", {split, builder.literal(0.5, type)}, type);
    if (one.with_other) x = builder.pointwise("add", {x, old}, type);
    if (one.read_twice) builder.copy_out(builder.matmul(made, builder.input({24, 3}, type), -1, type));
    if (one.early_reader) builder.copy_out(builder.reduce("amax", old, {0}, true, type));
    builder.into(one.early_reader ? old : builder.output({2, one.m / 2, 24}, type), "relu", {x});
    expect_same(
        builder.graph, [&](Memory& memory) { fill_inputs(memory, builder.graph); }, 1, 6);
    size_t rows = 0;
    for (const Stage& stage : stages_for(builder.graph, 6)) rows += std::holds_alternative<RowProgram>(stage.body);
    EXPECT_EQ(rows, one.rows);
  }
}

TEST(Stages, AddInPlaceDoesNotJoinANormThatWouldLoadItAgain) {
  GraphBuilder builder;
  const int x = builder.input({3, 16}, ScalarType::f32, true), y = builder.input({3, 16});
  builder.into(x, "add", {x, y});
  builder.copy_out(builder.pointwise("sub", {x, builder.reduce("mean", x, {1})}));
  EXPECT_EQ(stages_of(builder).size(), 2u);
}

TEST(Stages, DeadNodesHaveNone) {
  GraphBuilder builder;
  const int x = builder.input({3, 16});
  builder.pointwise("exp", {builder.pointwise("neg", {x})});
  builder.copy_out(x);
  EXPECT_EQ(stages_of(builder).size(), 1u);
}

class RandomPrograms : public testing::TestWithParam<uint32_t> {};

TEST_P(RandomPrograms, ComputeWhatTheNodesCompute) {
  for (uint32_t i = 0; i < 40; ++i) {
    const uint32_t seed = GetParam() * 1000 + i;
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomGraph random(seed);
    expect_same(
        random.graph(), [&](Memory& memory) { random.fill(memory); }, seed, i % 2 == 0 ? 1 : 5);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomPrograms, testing::Range(0u, 20u));

}  // namespace
}  // namespace ark::compiler
