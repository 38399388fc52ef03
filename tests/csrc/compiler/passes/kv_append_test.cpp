// Tests which attention stages of a GPU's plan compute their queries and the new cache position themselves, that they
// compute the same as the nodes, and that the validator checks whose rows a task reads.
#include "compiler/passes/kv_append.hpp"
#include "compiler/graph/stage_queries.hpp"
#include "compiler/passes/pipeline.hpp"
#include "compiler/verify/validator.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "compiler/emit/cuda/emit_cuda.hpp"
#include "compiler/fuse/stage_case.hpp"
#include "compiler/schedule/plan.hpp"
#include "compiler/schedule/targets.hpp"
#include "util/error.hpp"

namespace ark::compiler {
namespace append_positions_test {

constexpr int kWorkers = 8;

enum class Case {
  plain,
  turned,           // rotary embeddings, by halves
  as_they_are,      // keys are copied without rotation
  wrapped,          // the position counts from the end
  one_block,        // of positions
  two_queries,      // and as many new positions
  queries_again,    // queries have another reader
  between,          // the cache is read after the append, before attention
  two_places,       // one for keys, another for values
  part_of_a_cache,  // attention reads only the first positions
};

struct Decoding {
  GraphBuilder builder;
  int index = -1;
};

int turned(GraphBuilder& builder, int x) {
  const int half = builder.temporary(builder.at(x).shape);
  builder.into(builder.slice(half, 3, 0, 2), "neg", {builder.slice(x, 3, 2, 4)});
  builder.into(builder.slice(half, 3, 2, 4), "copy", {builder.slice(x, 3, 0, 2)});
  const int other = builder.pointwise("mul", {half, builder.input({4})});
  return builder.pointwise("add", {builder.pointwise("mul", {x, builder.input({4})}), other});
}

// Six query heads on two key heads, four columns.
Decoding decoding(Case one) {
  Decoding made;
  GraphBuilder& builder = made.builder;
  const int64_t queries = one == Case::two_queries ? 2 : 1, positions = one == Case::one_block ? 100 : 300;
  const int keys = builder.input({1, 2, positions, 4}, ScalarType::f32, true);
  const int values = builder.input({1, 2, positions, 4}, ScalarType::f32, true);
  made.index = builder.input({queries}, ScalarType::i64);
  const int other = one == Case::two_places ? builder.input({queries}, ScalarType::i64) : made.index;
  const auto heads = [&](int64_t count) {
    const int projected = builder.input({1, queries, count * 4});
    return builder.permute(builder.reshape(projected, {1, queries, count, 4}), {0, 2, 1, 3});
  };
  const auto made_of = [&](int x) {
    return one == Case::turned ? turned(builder, x) : builder.pointwise("mul", {x, builder.input({4})});
  };
  const int q = made_of(heads(6)), k = heads(2), v = heads(2);
  const Attributes along{{"dim", int64_t{2}}, {"wrap", one == Case::wrapped}};
  builder.into(keys, "scatter", {keys, made.index, one == Case::as_they_are ? k : made_of(k)}, along);
  builder.into(values, "scatter", {values, other, v}, along);
  if (one == Case::queries_again) builder.copy_out(q);
  if (one == Case::between) builder.copy_out(keys);
  std::vector<int> inputs{q, keys, values};
  if (one == Case::part_of_a_cache) inputs = {q, builder.slice(keys, 2, 0, 280), builder.slice(values, 2, 0, 280)};
  builder.into(builder.output({1, 6, queries, 4}), "attention", inputs, {{"scale", 0.5}});
  return made;
}

std::vector<Stage> appended(const std::vector<Stage>& stages) {
  std::vector<Stage> found;
  for (const Stage& stage : stages) {
    const AttentionStage* const attention = attention_of(stage);
    if (attention != nullptr && attention->added.k >= 0) found.push_back(stage);
  }
  return found;
}

TEST(AppendedPositions, ByTheTasksThatLookAtThem) {
  for (const Case one :
       {Case::plain, Case::turned, Case::as_they_are, Case::wrapped, Case::one_block, Case::two_queries,
        Case::queries_again, Case::between, Case::two_places, Case::part_of_a_cache}) {
    const bool wanted = one <= Case::one_block;
    for (const double place : {0.0, 99.0, 255.0, 256.0, 299.0}) {
      if (one == Case::one_block && place > 99) continue;
      Decoding made = decoding(one);
      expect_same(
          made.builder.graph,
          [&](Memory& memory) {
            fill_inputs(memory, made.builder.graph);
            for (int index : {made.index, made.index + 1}) {
              if (made.builder.at(index).type != ScalarType::i64) continue;
              std::vector<double>& cells = memory.cells[static_cast<size_t>(made.builder.at(index).buffer)];
              for (size_t i = 0; i < cells.size(); ++i)
                cells[i] = one == Case::wrapped ? place - 300 : std::max(0.0, place - static_cast<double>(i / 8));
            }
          },
          3, kWorkers);
    }
    Decoding made = decoding(one);
    const std::vector<Stage> stages = stages_for(made.builder.graph, kWorkers);
    EXPECT_EQ(appended(stages).size(), !wanted ? 0u : one == Case::one_block ? 1u : 2u) << static_cast<int>(one);
    for (const Stage& stage : stages)
      EXPECT_FALSE(wanted && std::holds_alternative<ScatterStage>(stage.body)) << static_cast<int>(one);
    for (const bool multi_step : {false, true}) {
      const Plan plan = make_plan(decoding(one).builder.graph, gpu_target("sm_90a", kWorkers), multi_step);
      EXPECT_EQ(emit_cuda(plan).text.find("return index_fits(") != std::string::npos, wanted);
    }
    EXPECT_TRUE(appended(make_plan(decoding(one).builder.graph, target_named("cpu", kWorkers)).stages).empty());
  }
}

TEST(AppendedPositions, TheValidatorLooksAtWhoseRowsTheyRead) {
  const auto verdict = [](bool whole) -> std::string {
    Plan plan = make_plan(decoding(Case::plain).builder.graph, gpu_target("sm_90a", kWorkers));
    for (Stage& stage : plan.stages)
      if (whole && !stage.tail.empty()) stage.tail.back().accesses[0].axis = -1;
    try {
      validate(plan);
    } catch (const Error& error) {
      return error.message();
    }
    return "";
  };
  EXPECT_EQ(verdict(false), "");
  EXPECT_NE(verdict(true).find("another tile"), std::string::npos);
}

}  // namespace append_positions_test
}  // namespace ark::compiler
