// Tests collectives as tasks of a GPU's loop kernel: how they are cut, where their packets are, what the ranks compare,
// and what is refused.
#include "compiler/passes/lower_collectives.hpp"
#include "compiler/graph/stage_queries.hpp"
#include "compiler/passes/pipeline.hpp"
#include "compiler/verify/validator.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <tuple>

#include "compiler/emit/cuda/emit_cuda.hpp"
#include "compiler/graph/graph_builder.hpp"
#include "compiler/schedule/plan.hpp"
#include "compiler/schedule/targets.hpp"
#include "util/error.hpp"

namespace ark::compiler {
namespace {

Attributes of_ranks(int64_t ranks, const std::string& reduce_op = "", int64_t group = 0) {
  Attributes attributes{{"group", group}, {"ranks", ranks}};
  if (!reduce_op.empty()) attributes["reduce_op"] = reduce_op;
  return attributes;
}

// A layer of a tensor-parallel model: a product, its sum over the ranks, a norm's reduction, the next product and sum.
Graph layer(int64_t hidden, int64_t ranks, const std::string& reduce_op = "sum", int64_t rows = 1) {
  GraphBuilder make;
  int x = make.input({rows, hidden});
  for (int i = 0; i < 2; ++i) {
    const int product = make.matmul(x, make.transpose(make.parameter({hidden, hidden})));
    const int sum = make.into(make.temporary({rows, hidden}), "all_reduce", {product}, of_ranks(ranks, reduce_op));
    x = make.pointwise("div", {sum, make.reduce("sum", make.pointwise("mul", {sum, sum}), {1})});
  }
  make.copy_out(x);
  return make.graph;
}

Plan on_gpu(Graph graph, int workers = 132) {
  return make_plan(std::move(graph), gpu_target("sm_90a", workers));
}

std::vector<int> tiles_of(const Plan& plan, int stage) {
  std::vector<int> tiles;
  for (size_t i = 0; i < plan.tasks.size(); ++i)
    if (plan.tasks[i].stage == stage) tiles.push_back(static_cast<int>(i));
  return tiles;
}

std::string refused(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
    return error.what();
  }
  return "";
}

// The worker that computed a tile pushes it, so it waits only for peers.
TEST(SpreadCollectivesTest, TilesFollowTheProducts) {
  const Plan plan = on_gpu(layer(2048, 4, "avg"));
  constexpr int64_t kPlace = 4 * 2 * 2048 * 4;  // packets of four ranks
  int collectives = 0;
  for (size_t stage = 0; stage < plan.stages.size(); ++stage) {
    if (!is_spread(plan.stages[stage])) continue;
    const auto& body = std::get<CollectiveStage>(plan.stages[stage].body);
    EXPECT_EQ(body.place, collectives * kPlace);
    EXPECT_EQ(body.half, 2 * kPlace);
    const std::vector<int> tiles = tiles_of(plan, static_cast<int>(stage));
    const std::vector<int> products = tiles_of(plan, static_cast<int>(stage) - 1);
    ASSERT_EQ(plan.stages[stage - 1].kind, "matmul");
    EXPECT_GT(tiles.size(), 100u);
    ASSERT_EQ(tiles.size(), products.size());
    std::set<int> workers;
    for (size_t i = 0; i < tiles.size(); ++i) {
      const Task &tile = plan.tasks[tiles[i]], &product = plan.tasks[products[i]];
      EXPECT_EQ(std::tie(tile.begin, tile.end, tile.worker), std::tie(product.begin, product.end, product.worker));
      EXPECT_TRUE(tile.waits.empty());
      workers.insert(tile.worker);
    }
    EXPECT_EQ(workers.size(), tiles.size());
    ++collectives;
  }
  EXPECT_EQ(collectives, 2);
  const Exchanges all = exchanges_of(plan.graph, plan.stages);
  EXPECT_EQ(all.ranks, 4);
  EXPECT_EQ(all.group, 0);
  EXPECT_EQ(all.bytes, 4 * kPlace);
}

// Fusion moves the first collective after a product, and the second one, which depends on nothing, must move with it.
// Ranks with collectives in different orders would wait for each other forever.
TEST(SpreadCollectivesTest, StagesKeepTheOrderOfTheGraph) {
  GraphBuilder make;
  const Shape shape{1, 16};
  const int x = make.input(shape), z = make.input(shape), a = make.input(shape), b = make.input({16, 16});
  const int negated = make.pointwise("neg", {x});
  const int first = make.into(make.temporary(shape), "all_reduce", {negated}, of_ranks(2, "sum"));
  const int second = make.into(make.temporary(shape), "all_reduce", {z}, of_ranks(2, "max"));
  const int product = make.matmul(a, b);
  make.copy_out(make.pointwise("add", {negated, product}));  // one stage with the negation, after the product
  make.copy_out(first), make.copy_out(second);
  std::vector<int> nodes;
  size_t at_product = 0, at_first = 0, place = 0;
  for (const Stage& stage : make_stages(make.graph)) {
    if (std::holds_alternative<MatmulStage>(stage.body)) at_product = place;
    if (std::holds_alternative<CollectiveStage>(stage.body)) {
      if (nodes.empty()) at_first = place;
      nodes.push_back(stage.node);
    }
    ++place;
  }
  EXPECT_EQ(nodes, (std::vector<int>{1, 2}));
  EXPECT_LT(at_product, at_first) << "nothing has moved the first one: this graph shows nothing";
}

TEST(SpreadCollectivesTest, InputsAreCutBySize) {
  const auto tiles = [](Shape shape, int workers) {
    GraphBuilder make;
    const int x = make.input(shape, ScalarType::bf16);
    make.into(make.output(shape, ScalarType::bf16), "all_reduce", {x}, of_ranks(2, "avg"));
    return tiles_of(on_gpu(make.graph, workers), 0).size();
  };
  EXPECT_EQ(tiles({1000, 4096}, 16), 16u);
  EXPECT_EQ(tiles({2, 2048}, 132), 8u);
  EXPECT_EQ(tiles({3}, 132), 1u);
}

// The workers that compute a small tensor exchange their own parts instead of passing them on.
TEST(SpreadCollectivesTest, SmallResultsAreNotHandedAround) {
  GraphBuilder make;
  const int x = make.input({1, 2048});
  int y = make.pointwise("div", {x, make.reduce("sum", x, {1})});
  y = make.into(make.temporary({1, 2048}), "all_reduce", {y}, of_ranks(2, "sum"));
  make.copy_out(make.pointwise("mul", {y, y}));
  const Plan plan = on_gpu(make.graph);
  const auto stage = std::find_if(plan.stages.begin(), plan.stages.end(), is_spread) - plan.stages.begin();
  const std::vector<int> tiles = tiles_of(plan, static_cast<int>(stage));
  EXPECT_FALSE(tiles.empty());
  for (const int tile : tiles) EXPECT_TRUE(plan.tasks[tile].waits.empty());
}

TEST(SpreadCollectivesTest, EveryKindIsEmitted) {
  GraphBuilder make;
  const int x = make.input({8, 100}, ScalarType::i64, true);
  make.into(x, "all_reduce", {x}, of_ranks(4, "bxor"));
  const int gathered = make.into(make.temporary({32, 100}, ScalarType::i64), "all_gather", {x}, of_ranks(4));
  const int part =
      make.into(make.temporary({8, 100}, ScalarType::i64), "reduce_scatter", {gathered}, of_ranks(4, "max"));
  Attributes even = of_ranks(4);
  even["input_splits"] = even["output_splits"] = std::vector<int64_t>{2, 2, 2, 2};
  make.into(make.output({8, 100}, ScalarType::i64), "all_to_all", {part}, even);
  const std::string text = emit_cuda(on_gpu(make.graph)).text;
  for (const char* const call :
       {"exchange<Exchange::all_reduce, ark::device::DType::i64, ark::device::ReduceOp::bxor, 4>(context, p0, p0, "
        "p[1], p[2], 212992, 6400, begin * 8, end * 8);",
        "exchange<Exchange::all_gather, ark::device::DType::i64, ark::device::ReduceOp::sum, 4>(context, p0, p1, "
        "p[2], p[3], 212992, 6400, begin * 8, end * 8);",
        "exchange<Exchange::reduce_scatter, ark::device::DType::i64, ark::device::ReduceOp::max, 4>(context, p0, p1, "
        "p[2], p[3], 212992, 6400, begin * 8, end * 8);",
        "exchange<Exchange::all_to_all, ark::device::DType::i64, ark::device::ReduceOp::sum, 4>(context, p0, p1, "
        "p[2], p[3], 212992, 1600, begin * 8, end * 8);"})
    EXPECT_NE(text.find(call), std::string::npos) << call << "\n" << text;
}

TEST(SpreadCollectivesTest, RanksCompareWhatTheyExchange) {
  const auto of = [](int64_t hidden, int64_t ranks, int workers) {
    const Plan plan = on_gpu(layer(hidden, ranks), workers);
    return exchanges_of(plan.graph, plan.stages).fingerprint;
  };
  EXPECT_EQ(of(2048, 4, 132), of(2048, 4, 100));
  EXPECT_NE(of(2048, 4, 132), of(2049, 4, 132));
  EXPECT_NE(of(2048, 4, 132), of(2048, 3, 132));
  for (const char* const op : {"sum", "avg"}) {
    Plan plan = on_gpu(layer(2048, 4, op));
    const uint64_t before = exchanges_of(plan.graph, plan.stages).fingerprint;
    plan.stages.erase(plan.stages.begin(), plan.stages.begin() + 2);  // a product and, if present, its collective
    EXPECT_NE(exchanges_of(plan.graph, plan.stages).fingerprint, before);
  }
}

Attributes over_nodes(int64_t ranks, int64_t nodes, const std::string& reduce_op = "sum") {
  Attributes attributes = of_ranks(ranks, reduce_op);
  attributes["nodes"] = nodes;
  return attributes;
}

// So many sums, one after the other.
Plan sums_over_nodes(int count, int64_t elements, const Attributes& attributes, ScalarType type = ScalarType::bf16) {
  GraphBuilder make;
  int x = make.input({elements}, type);
  for (int i = 0; i < count; ++i)
    x = make.pointwise("neg", {make.into(make.temporary({elements}, type), "all_reduce", {x}, attributes)}, type);
  make.copy_out(x);
  return on_gpu(make.graph);
}

// Both ends of a message find it by the graph alone: a tile is whole chunks, and each chunk in flight has a lane.
TEST(SpreadCollectivesTest, OverNodesTilesAreMessages) {
  constexpr int64_t kChunk = 8192;  // elements of bfloat16 in 16 KB
  for (const int64_t elements : {int64_t{5}, kChunk, 4 * kChunk + 1, 32 * kChunk}) {
    for (const int count : {1, 3, 70}) {
      const int64_t chunks = (elements + kChunk - 1) / kChunk;
      const Plan plan = sums_over_nodes(count, elements, over_nodes(6, 2));
      validate(plan);
      std::vector<const CollectiveStage*> all;
      for (size_t stage = 0; stage < plan.stages.size(); ++stage) {
        if (!is_spread(plan.stages[stage])) continue;
        all.push_back(&std::get<CollectiveStage>(plan.stages[stage].body));
        EXPECT_EQ(all.back()->ranks, 3);
        EXPECT_EQ(all.back()->nodes, 2);
        const std::vector<int> tiles = tiles_of(plan, static_cast<int>(stage));
        EXPECT_LE(tiles.size(), static_cast<size_t>(chunks));
        for (const int tile : tiles) EXPECT_EQ(plan.tasks[tile].begin % kChunk, 0);
      }
      ASSERT_EQ(all.size(), static_cast<size_t>(count));
      const Exchanges found = exchanges_of(plan.graph, plan.stages);
      EXPECT_EQ(found.ranks, 6);
      EXPECT_EQ(found.nodes, 2);
      EXPECT_LE(found.lanes, 64);
      EXPECT_EQ(found.message_bytes, 2 * 16384);  // in float32
      std::set<int> lanes;
      for (const CollectiveStage* const one : all) {
        EXPECT_EQ(one->lane % chunks, 0);
        EXPECT_LE(one->lane + chunks, found.lanes);
        lanes.insert(one->lane);
      }
      const auto distinct = static_cast<int64_t>(lanes.size());
      EXPECT_TRUE(distinct == count || (distinct >= 2 && distinct % 2 == 0)) << distinct;
      // The second of two that have a lane comes after all tiles of the first.
      for (size_t i = 0; i + distinct < all.size(); ++i) EXPECT_EQ(all[i]->lane, all[i + distinct]->lane);
    }
  }
  EXPECT_EQ(
      exchanges_of(sums_over_nodes(1, 100, over_nodes(2, 2)).graph, sums_over_nodes(1, 100, over_nodes(2, 2)).stages)
          .message_bytes,
      16384)
      << "a node's only rank sends its input";
}

TEST(SpreadCollectivesTest, OverNodesRanksCompareTheNodes) {
  const auto of = [](int64_t ranks, int64_t nodes) {
    const Plan plan = sums_over_nodes(2, 100, over_nodes(ranks, nodes));
    return exchanges_of(plan.graph, plan.stages).fingerprint;
  };
  EXPECT_EQ(of(4, 2), of(4, 2));
  EXPECT_NE(of(4, 2), of(4, 1));
  EXPECT_NE(of(4, 2), of(4, 4));
  EXPECT_NE(of(4, 2), of(6, 3)) << "two places each";
}

// A product's parts are not pushed to readers, who would find those of their own node alone.
TEST(SpreadCollectivesTest, OverNodesSumsStayTasks) {
  GraphBuilder make;
  const int x = make.input({1, 2048});
  const int product = make.matmul(x, make.transpose(make.parameter({2048, 2048})));
  const int sum = make.into(make.temporary({1, 2048}), "all_reduce", {product}, over_nodes(4, 2));
  make.copy_out(make.pointwise("add", {sum, x}));
  const Plan plan = on_gpu(make.graph);
  EXPECT_EQ(std::ranges::count_if(plan.stages, is_spread), 1);
  const std::string text = emit_cuda(plan).text;
  EXPECT_NE(text.find("all_reduce_between<ark::device::DType::f32, ark::device::ReduceOp::sum, 2>(context, p0, p1, "
                      "p[2], p[3], p[4], 32768, 16384, 8192, begin * 4, end * 4);"),
            std::string::npos)
      << text;
}

TEST(SpreadCollectivesTest, WhatNodesDoNotExchangeIsRefused) {
  const auto told = [](const std::string& op, const std::string& reduce_op, ScalarType type, int64_t elements,
                       int nodes = 2, int places = 2) {
    const std::string why = why_not_over_nodes(op, reduce_op, type, elements * size_of(type), nodes, places);
    if (op == "all_reduce") {
      const std::string thrown =
          refused([&] { sums_over_nodes(1, elements, over_nodes(nodes * places, nodes, reduce_op), type); });
      EXPECT_EQ(thrown.empty(), why.empty()) << thrown;
      EXPECT_NE(thrown.find(why), std::string::npos) << thrown;
    }
    return why;
  };
  EXPECT_EQ(told("all_reduce", "avg", ScalarType::f16, 1 << 18), "");
  EXPECT_NE(told("all_reduce", "sum", ScalarType::f16, (1 << 18) + 1).find("up to 512 KB"), std::string::npos);
  EXPECT_NE(told("all_reduce", "max", ScalarType::f32, 8).find("not max"), std::string::npos);
  EXPECT_NE(told("all_reduce", "sum", ScalarType::i32, 8).find("not int32"), std::string::npos);
  EXPECT_NE(told("all_reduce", "sum", ScalarType::f32, 8, 17, 1).find("16 nodes"), std::string::npos);
  EXPECT_NE(told("all_gather", "", ScalarType::f32, 8).find("not all_gather"), std::string::npos);
}

TEST(SpreadCollectivesTest, WhatCannotBeExchangedIsRefused) {
  const auto one = [](const std::string& op, const Attributes& attributes, ScalarType type, int64_t out = 8) {
    return refused([&] {
      GraphBuilder make;
      const int x = make.input({8}, type);
      make.into(make.output({out}, type), op, {x}, attributes);
      on_gpu(make.graph);
    });
  };
  EXPECT_EQ(one("all_reduce", of_ranks(8, "sum"), ScalarType::f32), "");
  EXPECT_NE(one("all_reduce", of_ranks(9, "sum"), ScalarType::f32).find("9 ranks"), std::string::npos);
  EXPECT_NE(one("all_reduce", of_ranks(2, "avg"), ScalarType::i64).find("avg of int64"), std::string::npos);
  EXPECT_NE(one("all_reduce", of_ranks(2, "band"), ScalarType::f32).find("band of float32"), std::string::npos);
  EXPECT_NE(one("all_reduce", of_ranks(2, "median"), ScalarType::f32).find("'median'"), std::string::npos);
  EXPECT_NE(one("all_gather", of_ranks(2), ScalarType::f32, 24).find("different sizes"), std::string::npos);
  Attributes uneven = of_ranks(2);
  uneven["input_splits"] = uneven["output_splits"] = std::vector<int64_t>{3, 5};
  EXPECT_NE(one("all_to_all", uneven, ScalarType::f32).find("different sizes"), std::string::npos);

  EXPECT_NE(refused([] {
              GraphBuilder make;
              const int x = make.input({8});
              const int y = make.into(make.temporary({8}), "all_reduce", {x}, of_ranks(2, "sum", 0));
              make.into(make.output({8}), "all_reduce", {y}, of_ranks(2, "sum", 1));
              on_gpu(make.graph);
            }).find("another group"),
            std::string::npos);
  EXPECT_NE(refused([] {
              GraphBuilder make;
              const int x = make.input({16384, 4096});
              make.into(make.output({16384, 4096}), "all_reduce", {x}, of_ranks(2, "sum"));
              on_gpu(make.graph);
            }).find("MB for packets"),
            std::string::npos);
}

// Collectives that do not all fit share places in turn. Each waits for the end of the one that is half as many places
// before it.
TEST(SpreadCollectivesTest, LargeOnesTakeTurns) {
  GraphBuilder make;
  const int x = make.input({512, 2048});
  for (int i = 0; i < 7; ++i)  // independent of each other
    make.into(make.output({512, 2048}), "all_reduce", {x}, of_ranks(2, "sum"));
  const Plan plan = on_gpu(make.graph, 8);
  const int64_t bytes = 2 * 2 * 512 * 2048 * 4;
  EXPECT_EQ(exchanges_of(plan.graph, plan.stages).bytes, 4 * bytes);
  const auto ended_before = [&](int task, int stage) {  // every tile of the stage has ended, by the task's events
    std::set<int> seen;
    for (const int event : plan.tasks[task].waits)
      for (const int tile : tiles_of(plan, stage)) {
        const auto& signals = plan.tasks[tile].signals;
        if (std::find(signals.begin(), signals.end(), event) != signals.end()) seen.insert(tile);
      }
    for (const int tile : tiles_of(plan, stage))
      if (plan.tasks[tile].worker == plan.tasks[task].worker) seen.insert(tile);
    return seen.size() == tiles_of(plan, stage).size();
  };
  for (int stage = 0; stage < 7; ++stage) {
    const auto& body = std::get<CollectiveStage>(plan.stages[stage].body);
    EXPECT_EQ(body.number, stage + 1);
    EXPECT_EQ(body.place, stage % 2 * bytes);
    EXPECT_EQ(tiles_of(plan, stage).size(), 8u);
    for (const int task : tiles_of(plan, stage)) EXPECT_TRUE(stage == 0 || ended_before(task, stage - 1)) << task;
  }
}

// Another rank's plan may have them in the opposite order.
TEST(SpreadCollectivesTest, TwoTilesOnOneWorkerAreNoPlan) {
  Plan plan = on_gpu(layer(2048, 4, "avg"));
  validate(plan);
  const auto stage = std::find_if(plan.stages.begin(), plan.stages.end(), is_spread) - plan.stages.begin();
  const std::vector<int> tiles = tiles_of(plan, static_cast<int>(stage));
  auto& from = plan.queues[plan.tasks[tiles[1]].worker].tasks;
  from.erase(std::find(from.begin(), from.end(), tiles[1]));
  plan.tasks[tiles[1]].worker = plan.tasks[tiles[0]].worker;
  auto& to = plan.queues[plan.tasks[tiles[0]].worker].tasks;
  to.insert(std::find(to.begin(), to.end(), tiles[0]) + 1, tiles[1]);
  EXPECT_NE(refused([&] { validate(plan); }).find("second tile of a collective"), std::string::npos);
}

}  // namespace
}  // namespace ark::compiler
