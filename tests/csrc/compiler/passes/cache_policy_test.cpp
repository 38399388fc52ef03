// Tests which cache policy each access gets, by next use, kind of access and gain on the machine.
#include "compiler/passes/cache_policy.hpp"
#include "compiler/passes/pipeline.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "compiler/emit/cpu/emit_cpu.hpp"
#include "compiler/emit/cuda/emit_cuda.hpp"
#include "compiler/graph/graph_builder.hpp"
#include "compiler/passes/cache_hints.hpp"
#include "compiler/schedule/targets.hpp"
#include "util/error.hpp"

namespace {

using namespace ark::compiler;

constexpr int64_t kWide = 512;

// Layers of x = gelu(x w), with the lookup of a table's rows before them.
struct Layers {
  explicit Layers(int layers, int64_t rows = 1, int64_t table_rows = 1000) {
    const int table = build.parameter({table_rows, kWide}), index = build.input({rows}, ScalarType::i64);
    int x = build.temporary({rows, kWide});
    build.graph.add_node({"gather", {table, index}, {x}, {{"dim", int64_t{0}}}, "embedding"});
    for (int i = 0; i < layers; ++i) {
      Buffer buffer;
      buffer.kind = Buffer::Kind::input;
      buffer.argument = build.arguments++;
      buffer.parameter = true;
      const int w = build.tensor(buffer, {kWide, kWide}, ScalarType::f32);
      weights.push_back(w);
      const int product = build.temporary({rows, kWide});
      x = matmul(x, w, product, i);
      const bool last = i + 1 == layers;
      const int out = last ? build.output({rows, kWide}) : build.temporary({rows, kWide});
      build.graph.add_node({"neg", {x}, {out}, {}, "neg"});
      x = out;
    }
  }
  int matmul(int a, int b, int out, int layer) {
    build.graph.add_node({"matmul", {a, b}, {out}, {}, "layer " + std::to_string(layer)});
    return out;
  }
  Plan plan(const Target& target) const { return make_plan(build.graph, target); }

  GraphBuilder build;
  std::vector<int> weights;
};

Target gpu(CacheChoice choice = CacheChoice::automatic) {
  Target target = gpu_target("sm_90a", 8);
  target.caching = choice;
  target.caches.bytes = 4 * kWide * kWide * 4;  // four matrices
  return target;
}

// Returns the policy that each layer's matrix is read with.
std::vector<CachePolicy> of_weights(const Layers& layers, const Plan& plan) {
  std::vector<CachePolicy> found;
  for (const int weight : layers.weights)
    for (const Stage& stage : plan.stages)
      for (const Access& access : stage.accesses)
        if (access.value == weight && !access.write) found.push_back(access.cache);
  return found;
}

template <class Check>
void each_access(const Plan& plan, Check check) {
  for (const Stage& stage : plan.stages)
    for (const Access& access : stage.accesses) check(stage, access);
}

using enum CachePolicy;

TEST(CachePolicy, UnmeasuredMatricesOfFewRowsMakeWayFirstAndAllElseIsPlain) {
  for (const int count : {2, 10}) {  // within the cache, and beyond it
    const Layers layers(count);
    const Plan plan = layers.plan(gpu());
    EXPECT_EQ(of_weights(layers, plan), std::vector<CachePolicy>(static_cast<size_t>(count), evict_first));
    each_access(plan, [&](const Stage& stage, const Access& access) {
      if (std::ranges::count(layers.weights, access.value) == 0) {
        EXPECT_EQ(access.cache, normal) << stage.name;
      }
    });
  }
}

TEST(CachePolicy, RowsOfATableBeyondTheCacheMakeWayFirst) {
  for (const int64_t rows : {1000, 4000}) {  // half of the cache, and twice its size
    int tables = 0;
    each_access(Layers(10, 1, rows).plan(gpu()), [&](const Stage& stage, const Access& access) {
      if (!access.sparse) return;
      ++tables;
      EXPECT_EQ(access.cache, rows > 1000 ? evict_first : normal) << stage.name;
    });
    EXPECT_EQ(tables, 1);
  }
}

// Pooled embeddings in tables of these many rows, beside layers that fill the cache. Returns the tables' policies.
std::vector<CachePolicy> of_tables(const std::vector<int64_t>& rows) {
  Layers layers(10);
  GraphBuilder& build = layers.build;
  std::vector<int> tables;
  for (const int64_t each : rows) {
    tables.push_back(build.parameter({each, kWide}));
    const int index = build.input({20}, ScalarType::i64), offsets = build.input({5}, ScalarType::i64);
    build.into(build.output({5, kWide}), "embedding_bag", {tables.back(), index, offsets},
               {{"mode", std::string("sum")}});
  }
  std::vector<CachePolicy> found;
  const Plan plan = layers.plan(gpu());
  for (const int table : tables)
    each_access(plan, [&](const Stage&, const Access& access) {
      if (access.value == table) found.push_back(access.cache);
    });
  return found;
}

TEST(CachePolicy, TheSmallestTablesThatFitTogetherStay) {  // 2048 rows fill the cache; Layers has a table of 1000
  EXPECT_EQ(of_tables({300, 200}), (std::vector{normal, normal}));
  EXPECT_EQ(of_tables({600, 900, 500}), (std::vector{normal, evict_first, normal}));
  EXPECT_EQ(of_tables({1900, 1900}), (std::vector{evict_first, evict_first}));
}

TEST(CachePolicy, AStepWithinTheCacheIsPlainWhereThatWasMeasured) {
  Target target = gpu();
  target.caches.plain_where_near = true;
  const Layers near(2), far(10);
  EXPECT_EQ(of_weights(near, near.plan(target)), std::vector<CachePolicy>(2, normal));
  EXPECT_EQ(of_weights(far, far.plan(target)), std::vector<CachePolicy>(10, evict_first));
}

TEST(CachePolicy, TheFirstParametersStayAsFarAsWasMeasured) {
  Target target = gpu();
  target.caches.kept_bytes = 2 * kWide * kWide * 4 + 1;
  const Layers far(10);
  std::vector<CachePolicy> wanted(10, evict_first);
  wanted[0] = wanted[1] = evict_last;
  EXPECT_EQ(of_weights(far, far.plan(target)), wanted);
  const Layers near(2);  // everything stays in the cache anyway
  EXPECT_EQ(of_weights(near, near.plan(target)), std::vector<CachePolicy>(2, evict_first));
}

// Products of one row of `a` with [kWide, kWide] matrices whose depth is contiguous. One kernel reads them all.
TEST(CachePolicy, ParametersThatOneKernelReadsStayTogetherOrNoneDoes) {
  GraphBuilder build;
  const int a = build.input({1, kWide});
  std::vector<int> weights;
  for (int i = 0; i < 3; ++i) {
    weights.push_back(build.transpose(build.parameter({kWide, kWide})));
    build.into(build.output({1, kWide}), "matmul", {a, weights.back()});
  }
  constexpr int64_t kMatrix = kWide * kWide * 4;
  for (const int64_t kept : {kMatrix, 2 * kMatrix, 3 * kMatrix}) {
    Target target = gpu();
    target.caches.bytes = 2 * kMatrix;
    target.caches.kept_bytes = kept;
    const Plan plan = make_plan(build.graph, target);
    ASSERT_EQ(plan.stages.size(), 1u);
    ASSERT_TRUE(std::holds_alternative<ProductsStage>(plan.stages[0].body));
    for (const Access& access : plan.stages[0].accesses)
      if (std::ranges::count(weights, access.value) > 0) {
        EXPECT_EQ(access.cache, kept == 3 * kMatrix ? evict_last : evict_first) << kept;
      }
  }
}

// Returns the policy of the matrix in the product of [rows, depth] and `matrix`, under all-first.
CachePolicy of_matrix(GraphBuilder build, int matrix, int64_t rows, ScalarType type = ScalarType::f32) {
  const Shape shape = build.at(matrix).shape;
  const int a = build.input({rows, shape[0]}, type), out = build.output({rows, shape[1]}, type);
  build.into(out, "matmul", {a, matrix});
  const Plan plan = make_plan(build.graph, gpu(CacheChoice::all_first));
  std::vector<CachePolicy> found;
  for (const Stage& stage : plan.stages)
    for (const Access& access : stage.accesses)
      if (access.value == matrix) found.push_back(access.cache);
  EXPECT_EQ(found.size(), 1u);
  return found.at(0);
}

TEST(CachePolicy, MatricesThatAreNotLoadedSixteenBytesAtATimeHaveNone) {
  GraphBuilder build;
  const int columns = build.transpose(build.parameter({64, 256}));  // depth is contiguous
  EXPECT_EQ(of_matrix(build, columns, 1), evict_first);
  EXPECT_EQ(of_matrix(build, build.slice(columns, 0, 0, 252), 1), evict_first);
  EXPECT_EQ(of_matrix(build, build.slice(columns, 0, 0, 254), 1), normal) << "no whole number of 16 bytes";
  EXPECT_EQ(of_matrix(build, build.slice(columns, 0, 4, 256), 1), evict_first);
  EXPECT_EQ(of_matrix(build, build.slice(columns, 0, 2, 254), 1), normal) << "begins in their middle";
  EXPECT_EQ(of_matrix(build, build.slice(columns, 0, 0, 256, 2), 1), normal) << "neither dimension is adjacent";
  EXPECT_EQ(of_matrix(build, build.transpose(build.parameter({64, 250})), 1), normal) << "rows begin anywhere";
  const int across = build.parameter({256, 64});
  EXPECT_EQ(of_matrix(build, across, 1), evict_first);
  EXPECT_EQ(of_matrix(build, build.slice(across, 0, 0, 250), 8), evict_first) << "any depth";
  EXPECT_EQ(of_matrix(build, across, 9), normal);
  EXPECT_EQ(of_matrix(build, build.parameter({256, 63}), 1), normal);
  const int halves = build.transpose(build.parameter({64, 256}, ScalarType::bf16));
  EXPECT_EQ(of_matrix(build, halves, 16, ScalarType::bf16), evict_first);
  EXPECT_EQ(of_matrix(build, halves, 17, ScalarType::bf16), normal);
  EXPECT_EQ(of_matrix(build, build.parameter({256, 64}, ScalarType::bf16), 5, ScalarType::bf16), normal);
}

// Returns the policies of keys and values for one query, under all-first.
std::vector<CachePolicy> of_states(int64_t columns, int64_t value_columns, bool moved = false) {
  GraphBuilder build;
  const int q = build.input({1, 2, 1, columns}), out = build.output({1, 2, 1, value_columns});
  int k = build.input({1, 2, 40, columns}), v = build.input({1, 2, 40, value_columns});
  if (moved) v = build.slice(build.input({1, 2, 40, value_columns + 4}), 3, 1, value_columns + 1);
  build.into(out, "attention", {q, k, v}, {{"scale", 1.0}, {"causal", false}});
  const Plan plan = make_plan(build.graph, gpu(CacheChoice::all_first));
  std::vector<CachePolicy> found;
  for (const Stage& stage : plan.stages)
    for (const Access& access : stage.accesses)
      if (const auto* one = std::get_if<AttentionStage>(&stage.body);
          one != nullptr && (access.value == one->k || access.value == one->v))
        found.push_back(access.cache);
  return found;
}

TEST(CachePolicy, KeysAndValuesAreHintedTogetherOrNotAtAll) {
  EXPECT_EQ(of_states(64, 64), std::vector(2, evict_first));
  EXPECT_EQ(of_states(64, 60), std::vector(2, evict_first));
  EXPECT_EQ(of_states(64, 62), std::vector(2, normal)) << "values' rows are no multiple of 16 bytes";
  EXPECT_EQ(of_states(64, 64, true), std::vector(2, normal)) << "values begin in their middle";
}

TEST(CachePolicy, WhatIsReadAgainSoonStaysLongestWhereThatWasMeasured) {
  Target target = gpu();
  target.packets = target.packets_of_rows = false;  // packets have no cache hints
  target.caches.reused_last = true;
  const Plan plan = Layers(10).plan(target);
  int kept = 0;
  each_access(plan, [&](const Stage& stage, const Access& access) {
    if (kind_of(plan, access) != OperandKind::activation || !can_hint(plan, stage, access)) return;
    const auto number = static_cast<size_t>(&stage - plan.stages.data());
    const double until = NextUses(plan).bytes_until_read(number, access);
    const bool again = until >= 0 && until < static_cast<double>(target.caches.bytes);
    EXPECT_EQ(access.cache, again ? evict_last : normal) << stage.name;
    kept += again ? 1 : 0;
  });
  EXPECT_GT(kept, 0);
}

TEST(CachePolicy, OnePolicyForAll) {
  const Layers layers(3);
  for (const auto& [choice, wanted] : {std::pair(CacheChoice::none, normal),
                                       {CacheChoice::all_first, evict_first},
                                       {CacheChoice::all_last, evict_last}}) {
    const Plan plan = layers.plan(gpu(choice));
    int hinted = 0;
    each_access(plan, [&](const Stage& stage, const Access& access) {
      const bool can =
          can_hint(plan, stage, access) || std::ranges::any_of(stage.tail, [&](const Stage& next) {
            return std::ranges::any_of(next.accesses, [&](const Access& same) {
              return same.value == access.value && same.write == access.write && can_hint(plan, next, same);
            });
          });
      EXPECT_EQ(access.cache, can ? wanted : normal) << stage.name;
      hinted += can ? 1 : 0;
    });
    EXPECT_GE(hinted, 5);
  }
}

TEST(CachePolicy, ProductsOfManyRowsHaveNone) {
  const Layers layers(2, 64);
  const Plan plan = layers.plan(gpu(CacheChoice::all_first));
  EXPECT_EQ(of_weights(layers, plan), std::vector<CachePolicy>(2, normal));
}

TEST(CachePolicy, NextUses) {
  GraphBuilder build;
  const int x = build.input({1, kWide}), w = build.parameter({kWide, kWide}), v = build.parameter({kWide, kWide});
  const int y = build.temporary({1, kWide}), z = build.output({1, kWide});
  build.graph.add_node({"matmul", {x, w}, {y}, {}, "first"});
  build.graph.add_node({"matmul", {y, v}, {z}, {}, "second"});
  Plan plan = make_plan(build.graph, gpu());
  ASSERT_EQ(plan.stages.size(), 2u);
  const NextUses uses(plan);
  const double first = plan.stages[0].bytes, second = plan.stages[1].bytes;
  EXPECT_DOUBLE_EQ(uses.step_bytes(), first + second);
  EXPECT_DOUBLE_EQ(uses.bytes_until_read(0, {w, -1, false}), second) << "until the next step";
  EXPECT_DOUBLE_EQ(uses.bytes_until_read(1, {v, -1, false}), first);
  EXPECT_DOUBLE_EQ(uses.bytes_until_read(0, {y, -1, true}), 0) << "by the next stage";
  EXPECT_DOUBLE_EQ(uses.bytes_until_read(1, {y, -1, false}), -1);
  EXPECT_DOUBLE_EQ(uses.bytes_until_read(1, {z, -1, true}), -1);
}

std::string emitted(CacheChoice choice, int64_t kept_bytes = 0) {
  Target target = gpu(choice);
  target.caches.kept_bytes = kept_bytes;
  return emit_cuda(Layers(10).plan(target)).text;
}

TEST(CachePolicy, TheTextOfAGpuHasIt) {
  const std::string none = emitted(CacheChoice::none), first = emitted(CacheChoice::all_first);
  EXPECT_EQ(none.find("evict"), std::string::npos);
  EXPECT_EQ(none.find("Hinted<"), std::string::npos);
  EXPECT_NE(none.find("kHintedLoads = false"), std::string::npos);
  EXPECT_NE(first.find(".b_cache = Cache::evict_first"), std::string::npos);
  EXPECT_NE(first.find("const Hinted<float, Cache::evict_first>* const p"), std::string::npos);
  EXPECT_NE(first.find("kHintedLoads = true"), std::string::npos);
  const std::string usual = emitted(CacheChoice::automatic);
  EXPECT_NE(usual.find(".b_cache = Cache::evict_first"), std::string::npos);
  EXPECT_EQ(usual.find("Hinted<"), std::string::npos);
  EXPECT_NE(usual.find("kHintedLoads = false"), std::string::npos) << "what was not measured stays as it was";
  const std::string kept = emitted(CacheChoice::automatic, 3 * kWide * kWide * 4);
  EXPECT_NE(kept.find(".b_cache = Cache::evict_last"), std::string::npos);
  EXPECT_NE(kept.find(".b_cache = Cache::evict_first"), std::string::npos);
  EXPECT_NE(kept.find("kHintedLoads = true"), std::string::npos);
}

// x + 1, into a result or in place.
Plan on_cpu(bool in_place, int64_t elements, int64_t stream_bytes, CacheChoice choice = CacheChoice::automatic) {
  GraphBuilder build;
  const int x = build.input({elements}), one = build.literal(1);
  const int out = in_place ? build.input({elements}, ScalarType::f32, true) : build.output({elements});
  build.graph.add_node({"add", {x, one}, {out}, {}, "add"});
  Target target;
  target.workers = 2;
  target.caching = choice;
  target.caches.bytes = target.caches.stream_bytes = stream_bytes;
  return make_plan(build.graph, target);
}

TEST(CachePolicy, ACpuStoresPastItsCachesWhatLastsAndIsLarge) {
  const auto text = [](const Plan& plan) { return emit_cpu(plan); };
  const std::string past = text(on_cpu(true, 4096, 4096));
  const size_t store = past.find("store_past("), fence = past.find("end_stores_past();");
  ASSERT_NE(store, std::string::npos);
  EXPECT_LT(store, fence) << "the release that publishes it comes behind the function";
  EXPECT_NE(fence, std::string::npos);
  for (const Plan& plain :
       {on_cpu(false, 4096, 4096), on_cpu(true, 1000, 4096), on_cpu(true, 4096, 0),
        on_cpu(true, 4096, 4096, CacheChoice::none), on_cpu(true, 4096, 4096, CacheChoice::all_last)})
    EXPECT_EQ(text(plain).find("_past("), std::string::npos);
  EXPECT_NE(text(on_cpu(false, 4096, 0, CacheChoice::all_first)).find("store_past("), std::string::npos);
}

Target cpu_of(CacheChoice choice, int64_t worker_bytes) {
  Target target;
  target.workers = 2;
  target.caching = choice;
  target.caches.worker_bytes = worker_bytes;
  return target;
}

// One row, or several, times the transpose of a matrix of weights.
Plan product_on_cpu(int64_t rows, int64_t depth, int64_t columns, ScalarType type,
                    CacheChoice choice = CacheChoice::automatic, int64_t worker_bytes = 1 << 20) {
  GraphBuilder build;
  const int w = build.transpose(build.parameter({columns, depth}, type)), x = build.input({rows, depth}, type);
  build.into(build.output({rows, columns}, type), "matmul", {x, w});
  return make_plan(build.graph, cpu_of(choice, worker_bytes));
}

TEST(CachePolicy, ACpusProductAsksAheadByWhereItsMatrixIs) {
  const auto ways = [](const Plan& plan) {
    const std::string text = emit_cpu(plan);
    return std::pair(text.find("Prefetch::ahead") != std::string::npos,
                     text.find("Prefetch::none") != std::string::npos);
  };
  const std::pair usual(false, false), ahead(true, false), none(false, true);
  constexpr ScalarType f32 = ScalarType::f32, bf16 = ScalarType::bf16;
  EXPECT_EQ(ways(product_on_cpu(1, 256, 256, f32)), none) << "the workers' caches hold it";
  EXPECT_EQ(ways(product_on_cpu(1, 256, 256, bf16)), usual) << "half types are not loaded so fast";
  EXPECT_EQ(ways(product_on_cpu(2, 256, 256, f32)), usual);
  EXPECT_EQ(ways(product_on_cpu(1, 1024, 1024, f32)), usual) << "short columns, beyond the caches";
  EXPECT_EQ(ways(product_on_cpu(1, 2048, 1024, f32)), ahead) << "long ones";
  EXPECT_EQ(ways(product_on_cpu(1, 4096, 1024, bf16)), ahead);
  EXPECT_EQ(ways(product_on_cpu(1, 2048, 1024, bf16)), usual);
  EXPECT_EQ(ways(product_on_cpu(4, 2048, 1024, f32)), usual) << "with rows from 16 KB on";
  EXPECT_EQ(ways(product_on_cpu(4, 4096, 1024, f32)), ahead);
  EXPECT_EQ(ways(product_on_cpu(5, 4096, 1024, f32)), usual) << "that kernel does not prefetch";
  for (const CacheChoice choice : {CacheChoice::none, CacheChoice::all_first, CacheChoice::all_last})
    EXPECT_EQ(ways(product_on_cpu(1, 2048, 1024, f32, choice)), usual);
  EXPECT_EQ(ways(product_on_cpu(1, 2048, 1024, f32, CacheChoice::automatic, 0)), usual) << "no such cache is known";
}

TEST(CachePolicy, ACpusBagsAskForRowsOfTablesBeyondAWorkersCache) {
  const auto asks = [](int64_t rows, CacheChoice choice) {
    GraphBuilder build;
    const int table = build.parameter({rows, 64}), index = build.input({100}, ScalarType::i64),
              offsets = build.input({5}, ScalarType::i64);
    build.into(build.output({5, 64}), "embedding_bag", {table, index, offsets}, {{"mode", std::string("sum")}});
    return emit_cpu(make_plan(build.graph, cpu_of(choice, 1 << 20))).find("Prefetch::ahead") != std::string::npos;
  };
  EXPECT_FALSE(asks(4096, CacheChoice::automatic));
  EXPECT_TRUE(asks(4097, CacheChoice::automatic));
  EXPECT_FALSE(asks(4097, CacheChoice::none));
}

TEST(CachePolicy, NamesOfChoices) {
  for (const char* name : {"auto", "none", "all-first", "all-last"}) EXPECT_STREQ(name_of(cache_choice(name)), name);
  EXPECT_THROW(cache_choice("first"), ark::Error);
}

}  // namespace
