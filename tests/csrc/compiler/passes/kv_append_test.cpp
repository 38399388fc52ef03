// Tests which attention stages of a GPU's plan compute their queries and the new cache position themselves, that they
// compute the same as the nodes, and that the validator checks whose rows a task reads.
#include "compiler/passes/kv_append.hpp"
#include "compiler/graph/stage_queries.hpp"
#include "compiler/passes/pipeline.hpp"
#include "compiler/verify/validator.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
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

// A batch of sequences that are at the same position.
enum class Batch {
  of_three,
  turned,          // rotary embeddings, by halves
  as_they_are,     // keys are copied without rotation
  two_heads_each,  // for a worker
  one_at_a_time,   // too much for shared memory: a task keeps what it makes of one head
  half_a_buffer,   // the same, but the queries are the first half of a buffer
  own_places,      // every sequence is at another position
  own_masks,       // and has a mask of its own
  too_many_heads,  // for each worker
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

// Six query heads on two key heads, in each of a batch of sequences.
Decoding batch_of(Batch one) {
  Decoding made;
  GraphBuilder& builder = made.builder;
  const bool large = one == Batch::one_at_a_time || one == Batch::half_a_buffer;
  const int64_t batch = one == Batch::half_a_buffer    ? 4
                        : large                        ? 4
                        : one == Batch::two_heads_each ? 8
                        : one == Batch::too_many_heads ? 17
                                                       : 3,
                positions = large ? 40 : 300;
  const int64_t columns = large ? 64 : 4;
  const int keys = builder.input({batch, 2, positions, columns}, ScalarType::f32, true);
  const int values = builder.input({batch, 2, positions, columns}, ScalarType::f32, true);
  const bool own = one == Batch::own_places;
  made.index = builder.input(own ? Shape{batch, 2, 1, columns} : Shape{1}, ScalarType::i64);
  const auto heads = [&](int64_t count) {
    return builder.reshape(builder.input({batch, count * columns}), {batch, count, 1, columns});
  };
  const auto made_of = [&](int x) {
    return one == Batch::turned ? turned(builder, x) : builder.pointwise("mul", {x, builder.input({columns})});
  };
  int q = heads(6);
  const int k = heads(2), v = heads(2);
  if (one == Batch::half_a_buffer) {
    const int half = builder.slice(builder.temporary({2 * batch, 6, 1, columns}), 0, 0, batch);
    builder.into(half, "mul", {q, builder.input({columns})});
    q = half;
  } else {
    q = made_of(q);
  }
  const Attributes along{{"dim", int64_t{2}}, {"along", own}};
  builder.into(keys, "scatter", {keys, made.index, one == Batch::as_they_are ? k : made_of(k)}, along);
  builder.into(values, "scatter", {values, made.index, v}, along);
  std::vector<int> inputs{q, keys, values};
  if (one == Batch::own_masks) inputs.push_back(builder.input({batch, 1, 1, positions}));
  builder.into(builder.output({batch, 6, 1, columns}), "attention", inputs, {{"scale", 0.5}});
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

TEST(AppendedPositions, OfABatch) {
  for (const Batch one :
       {Batch::of_three, Batch::turned, Batch::as_they_are, Batch::two_heads_each, Batch::one_at_a_time,
        Batch::half_a_buffer, Batch::own_places, Batch::own_masks, Batch::too_many_heads}) {
    const auto name = static_cast<int>(one);
    const bool wanted = one <= Batch::one_at_a_time;
    for (const double place : {0.0, 39.0, 255.0, 299.0}) {
      if (place > 39 && (one == Batch::one_at_a_time || one == Batch::half_a_buffer)) continue;
      if (one == Batch::own_places) continue;    // the interpreter takes one index for all
      for (const int workers : {1, kWorkers}) {  // 1: the CPU, where keys are stored through the index, too
        Decoding made = batch_of(one);
        expect_same(
            made.builder.graph,
            [&](Memory& memory) {
              fill_inputs(memory, made.builder.graph);
              std::vector<double>& cells = memory.cells[static_cast<size_t>(made.builder.at(made.index).buffer)];
              std::fill(cells.begin(), cells.end(), place);
            },
            3, workers);
      }
    }
    Decoding made = batch_of(one);
    const std::vector<Stage> stages = stages_for(made.builder.graph, kWorkers);
    EXPECT_EQ(appended(stages).size(), wanted ? 1u : 0u) << name;
    for (const Stage& stage : stages) EXPECT_FALSE(wanted && std::holds_alternative<ScatterStage>(stage.body)) << name;
    for (const bool multi_step : {false, true}) {
      const Plan plan = make_plan(batch_of(one).builder.graph, gpu_target("sm_90a", kWorkers), multi_step);
      EXPECT_EQ(emit_cuda(plan).text.find("return index_fits(") != std::string::npos, wanted) << name;
    }
  }
}

TEST(AppendedPositions, OfABatchWithPartsByStagesOfTheirOwn) {
  Decoding made = batch_of(Batch::turned);
  const std::vector<Stage> stages = stages_for(made.builder.graph, 64);
  EXPECT_GT(
      std::count_if(stages.begin(), stages.end(), [](const Stage& stage) { return attention_of(stage) != nullptr; }),
      1);
  EXPECT_TRUE(appended(stages).empty());
}

// The offsets in shared memory at which a source keeps what tasks make.
std::set<int64_t> kept_offsets(const std::string& source) {
  static const std::string before = "kept_bytes() + ";
  std::set<int64_t> found;
  for (size_t at = source.find(before); at != std::string::npos; at = source.find(before, at + 1))
    found.insert(std::stoll(source.substr(at + before.size())));
  return found;
}

TEST(AppendedPositions, OneHeadAtATimeWhereAllAreTooMuch) {
  const auto source = [](Batch one) {
    return emit_cuda(make_plan(batch_of(one).builder.graph, gpu_target("sm_90a", kWorkers))).text;
  };
  // Queries of 18 heads, then rows of 6 heads, of 16 bytes each.
  const std::string all = source(Batch::of_three);
  EXPECT_EQ(kept_offsets(all), (std::set<int64_t>{0, 288, 384}));
  EXPECT_EQ(all.find("- begin * 12)"), std::string::npos);
  EXPECT_EQ(all.find("_anew"), std::string::npos);
  // Queries of 3 heads, then a row, of 256 bytes each. Programs store what they make of head `begin` from the start.
  const std::string one = source(Batch::one_at_a_time);
  EXPECT_EQ(kept_offsets(one), (std::set<int64_t>{0, 768, 1024}));
  EXPECT_NE(one.find("- begin * 192)"), std::string::npos);
  EXPECT_NE(one.find("- begin * 64)"), std::string::npos);
  EXPECT_NE(one.find("for_elements_anew<0>"), std::string::npos);
  EXPECT_NE(one.find("attend<64, 64, s>(context, kept0, "), std::string::npos);
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
