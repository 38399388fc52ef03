// Which policy each access gets, by next use, kind and what the machine gains.
#include "plan/cache_policy.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "error.hpp"
#include "graph_builder.hpp"
#include "plan/emit_cpu.hpp"
#include "plan/emit_cuda.hpp"
#include "plan/targets.hpp"

namespace {

using namespace ark::plan;

constexpr int64_t kWide = 512;

// Layers of x = gelu(x w), and a table's rows before them.
struct Layers {
  explicit Layers(int layers, int64_t rows = 1) {
    const int table = build.parameter({1000, kWide}), index = build.input({rows}, ScalarType::i64);
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

// By layer: the policy that its matrix is read with.
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
  const Layers near(2);  // all of it stays by itself
  EXPECT_EQ(of_weights(near, near.plan(target)), std::vector<CachePolicy>(2, evict_first));
}

TEST(CachePolicy, WhatIsReadAgainSoonStaysLongestWhereThatWasMeasured) {
  Target target = gpu();
  target.packets = target.packets_of_rows = false;  // packets have no hints
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
      const bool can = can_hint(plan, stage, access);
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

// x + 1, into a result or into an input.
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

TEST(CachePolicy, NamesOfChoices) {
  for (const char* name : {"auto", "none", "all-first", "all-last"}) EXPECT_STREQ(name_of(cache_choice(name)), name);
  EXPECT_THROW(cache_choice("first"), ark::Error);
}

}  // namespace
