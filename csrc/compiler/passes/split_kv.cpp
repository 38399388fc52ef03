// Chooses the blocks of positions, and makes the partial attention stages and the stage that combines them. See
// split_kv.hpp.
#include "compiler/passes/split_kv.hpp"
#include <algorithm>
#include <utility>

#include "compiler/fuse/fuse_views.hpp"
#include "compiler/graph/stage_queries.hpp"
#include "compiler/passes/attention_parts.hpp"

namespace ark::compiler {

namespace {

constexpr int64_t kMostParts = 16;     // combined by the lanes of half a warp
constexpr int64_t kPassBytes = 32768;  // bytes of keys that a block's threads load at once

// Positions per part: enough to keep a block of threads busy, and no more parts than give every worker a tile. `tiles`:
// of one part.
int64_t positions_of_part(const Graph& graph, const AttentionStage& attention, int64_t tiles, int workers) {
  const Value &k = graph.values()[attention.k], &v = graph.values()[attention.v];
  const int64_t positions = k.shape[2];
  if (attention.causal) return positions;
  const int64_t row_bytes = std::max(k.shape[3] * size_of(k.type), v.shape[3] * size_of(v.type));
  const int64_t least = row_bytes <= kPassBytes / 256 ? 256 : 128;
  const int64_t parts = std::clamp<int64_t>(workers / tiles, 1, kMostParts);
  const int64_t even = (positions + parts - 1) / parts;
  return (even + least - 1) / least * least;
}

// A dense float32 temporary.
Value temporary(Graph& graph, const Shape& shape) {
  Value value;
  value.shape = shape;
  value.strides.assign(shape.size(), 1);
  for (size_t d = shape.size() - 1; d-- > 0;) value.strides[d] = value.strides[d + 1] * shape[d + 1];
  Buffer buffer;
  buffer.bytes = value.elements() * size_of(value.type);
  value.buffer = graph.add_buffer(buffer);
  return value;
}

// A view of indices [begin, end) of the dimension; all of it if its length is 1.
int cut(Graph& graph, Value value, size_t dim, int64_t begin, int64_t end) {
  if (value.shape[dim] > 1) {
    value.offset += begin * value.strides[dim];
    value.shape[dim] = end - begin;
  }
  return view_value(graph, value);
}

// One part of a value whose first dimension counts parts.
int part_of(Graph& graph, Value value, int64_t part) {
  value.offset += part * value.strides[0];
  value.shape.erase(value.shape.begin());
  value.strides.erase(value.strides.begin());
  return view_value(graph, value);
}

Stage combine_stage(Graph& graph, const Stage& attention, const Value& sums, const Value& states, int out) {
  Stage stage;
  const CombineStage body{view_value(graph, sums), view_value(graph, states), out,
                          std::get<AttentionStage>(attention.body).nan_rows};
  const Value& result = graph.values()[out];
  const int axis = result.shape[0] > result.shape[1] ? 0 : 1;
  stage.extent = result.shape[axis];
  stage.accesses = {{body.sums, axis + 1, false}, {body.states, axis + 1, false}, {out, axis, true}};
  stage.flops = 2 * static_cast<double>(sums.elements());
  stage.bytes = bytes_of(graph, {body.sums, body.states, out});
  stage.replicable = true;
  stage.kind = "combine";
  stage.name = "attention_combine";
  stage.origin = attention.origin;
  stage.body = body;
  return stage;
}

}  // namespace

std::vector<Stage> split_kv(Graph& graph, std::vector<Stage> stages, const Target& target) {
  std::vector<Stage> split;
  for (Stage& stage : stages) {
    const auto* attention = std::get_if<AttentionStage>(&stage.body);
    if (attention == nullptr || !takes_few_rows(graph, *attention)) {
      split.push_back(std::move(stage));
      continue;
    }
    const auto add = [&](const Stage& part) {
      for (Stage& one : parts_across(graph, part, target)) split.push_back(std::move(one));
    };
    const int64_t tiles = stage.extent * count_across(graph, stage, target);
    const int64_t positions = graph.values()[attention->k].shape[2];
    const int64_t step = positions_of_part(graph, *attention, tiles, target.workers);
    if (step >= positions) {
      add(stage);
      continue;
    }
    const Shape shape = graph.values()[attention->out].shape;
    const int64_t parts = (positions + step - 1) / step;
    const Value sums = temporary(graph, {parts, shape[0], shape[1], shape[2], shape[3]});
    const Value states = temporary(graph, {parts, shape[0], shape[1], shape[2], 2});
    for (int64_t index = 0; index < parts; ++index) {
      const int64_t begin = index * step, end = std::min(positions, begin + step);
      Stage part = stage;
      AttentionStage& body = std::get<AttentionStage>(part.body);
      body.k = cut(graph, graph.values()[attention->k], 2, begin, end);
      body.v = cut(graph, graph.values()[attention->v], 2, begin, end);
      if (body.mask >= 0) body.mask = cut(graph, graph.values()[attention->mask], 3, begin, end);
      body.out = part_of(graph, sums, index);
      body.states = part_of(graph, states, index);
      // Accesses are in the order queries, keys, values, mask, result.
      part.accesses[1].value = body.k;
      part.accesses[2].value = body.v;
      if (body.mask >= 0) part.accesses[3].value = body.mask;
      part.accesses.back().value = body.out;
      part.accesses.push_back({body.states, part.accesses.back().axis, true});
      part.flops = stage.flops * static_cast<double>(end - begin) / static_cast<double>(positions);
      part.bytes = bytes_of(graph, {body.q, body.k, body.v, body.out});
      add(part);
    }
    split.push_back(combine_stage(graph, stage, sums, states, attention->out));
  }
  return split;
}

}  // namespace ark::compiler
