// Tests which data crosses SMs as packets in plans for a GPU, and that packets need no event counters.
#include <gtest/gtest.h>

#include <string>
#include <variant>
#include <vector>

#include "compiler/emit/common/emit_tables.hpp"
#include "compiler/emit/cuda/emit_cuda.hpp"
#include "compiler/graph/graph_builder.hpp"
#include "compiler/passes/pipeline.hpp"
#include "compiler/schedule/targets.hpp"

namespace ark::compiler {
namespace packets_test {

constexpr int64_t kWidth = 512;

struct Made {
  Plan plan;
  int across, along, normed;  // buffers
};

// Three products. The first result is multiplied by a matrix with contiguous elements across the depth, the second one
// by a matrix with contiguous elements along the depth, and the third one goes through a norm.
Made some_products(int64_t rows, ScalarType type, bool multi_step = false) {
  GraphBuilder builder;
  const auto linear = [&](int a, bool turned = true) {
    const int weights = builder.parameter({kWidth, kWidth}, type);
    return builder.matmul(a, turned ? builder.transpose(weights) : weights, -1, type);
  };
  const int across = linear(builder.input({rows, kWidth}, type)), along = linear(across, false), normed = linear(along);
  const int mean = builder.reduce("mean", builder.pointwise("mul", {normed, normed}, type), {1}, true, type);
  builder.copy_out(linear(builder.pointwise("mul", {normed, builder.pointwise("rsqrt", {mean}, type)}, type)));
  Made made{make_plan(builder.graph, gpu_target("sm_90a", 6), multi_step), -1, -1, -1};
  std::vector<int> results;  // of products, in order
  for (const Stage& stage : made.plan.stages)
    if (const auto* product = std::get_if<MatmulStage>(&stage.body))
      results.push_back(made.plan.graph.values()[static_cast<size_t>(product->out)].buffer);
  made.across = results.at(0), made.along = results.at(1), made.normed = results.at(2);
  return made;
}

bool is_packets(const Plan& plan, int buffer) {
  return plan.placements[static_cast<size_t>(buffer)].packets;
}

TEST(Packets, ResultsOfFewRowsThatAreReadElementByElement) {
  for (const ScalarType type : {ScalarType::bf16, ScalarType::f16, ScalarType::f32}) {
    const Made made = some_products(1, type);
    EXPECT_TRUE(is_packets(made.plan, made.normed));
    EXPECT_TRUE(is_packets(made.plan, made.along));
    EXPECT_FALSE(is_packets(made.plan, made.across));
    EXPECT_NE(emit_cuda(made.plan).text.find("const Packet<"), std::string::npos);
    EXPECT_FALSE(is_packets(some_products(8, type).plan, made.normed));
    EXPECT_FALSE(is_packets(some_products(1, type, true).plan, made.normed));
  }
}

// A product into a cache: one row, or several that may need ordering.
TEST(Packets, ARowOnItsWayIntoACache) {
  for (const int64_t rows : {1, 2}) {
    GraphBuilder builder;
    const int64_t heads = 2, width = kWidth / heads;
    const int cache = builder.input({heads, 16, width}, ScalarType::bf16, true);
    const int index = builder.input({rows}, ScalarType::i64);
    const int weights = builder.transpose(builder.parameter({kWidth, kWidth}, ScalarType::bf16));
    const int row = builder.matmul(builder.input({rows, kWidth}, ScalarType::bf16), weights, -1, ScalarType::bf16);
    const int buffer = builder.graph.values()[static_cast<size_t>(row)].buffer;
    const int by_head = builder.view(row, {heads, rows, width}, {width, kWidth, 1});
    builder.into(cache, "scatter", {cache, index, by_head}, {{"dim", int64_t{1}}});
    const Plan plan = make_plan(builder.graph, gpu_target("sm_90a", 6));
    EXPECT_EQ(is_packets(plan, buffer), rows == 1);
    EXPECT_NO_THROW(emit_cuda(plan));
  }
}

TEST(Packets, TheirEventsAreNotCounted) {
  const Plan plan = some_products(1, ScalarType::bf16).plan;
  const EventTables tables(plan);
  size_t polled = 0, counted = 0;
  for (size_t task = 0; task < plan.tasks.size(); ++task) {
    size_t packets = 0;
    for (const int event : plan.tasks[task].waits) packets += plan.events[static_cast<size_t>(event)].packets ? 1 : 0;
    EXPECT_EQ(static_cast<size_t>(tables.wait_count[task]), plan.tasks[task].waits.size() - packets);
    polled += packets;
    counted += static_cast<size_t>(tables.wait_count[task]);
  }
  EXPECT_GT(polled, 0u);
  EXPECT_GT(counted, 0u);
  for (const EventTables::Wait& wait : tables.waits) {
    const Event& event = plan.events[static_cast<size_t>(wait.event)];
    EXPECT_FALSE(event.packets);
    EXPECT_EQ(wait.threshold, event.threshold);
  }
}

TEST(Packets, AnElementLiesTwiceAsFarFromTheFirst) {
  const Made made = some_products(1, ScalarType::bf16);
  Plan plan = made.plan;
  const int64_t offset = plan.placements[static_cast<size_t>(made.normed)].offset;
  int value = 0;
  while (plan.graph.values()[static_cast<size_t>(value)].buffer != made.normed) ++value;
  EXPECT_EQ(place_of(plan, value, 0).offset, offset);
  EXPECT_EQ(place_of(plan, value, 6).offset, offset + 12);
}

}  // namespace packets_test
}  // namespace ark::compiler
