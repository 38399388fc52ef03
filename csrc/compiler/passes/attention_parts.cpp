// See attention_parts.hpp.
#include "compiler/passes/attention_parts.hpp"

#include <algorithm>
#include <variant>

#include "compiler/fuse/fuse_views.hpp"
#include "compiler/schedule/matmul_tile.hpp"

namespace ark::compiler {

namespace {

// The dimension, of heads and batch, that the stage's axis does not cut.
size_t across(const Graph& graph, const Stage& stage) {
  const Value& k = graph.values()[std::get<AttentionStage>(stage.body).k];
  return stage.extent == k.shape[0] && k.shape[0] > k.shape[1] ? 1 : 0;
}

}  // namespace

int64_t heads_of(const Graph& graph, const AttentionStage& attention) {
  return graph.values()[attention.q].shape[1] / graph.values()[attention.k].shape[1];
}

Stage attention_part(Graph& graph, const Stage& stage, size_t dim, int64_t begin, int64_t end, double share) {
  Stage part = stage;
  AttentionStage& body = std::get<AttentionStage>(part.body);
  const int64_t times = dim == 1 ? heads_of(graph, body) : 1;
  // Accesses are in the order queries, keys, values, mask, result, states; several may be of one value.
  const auto view = [&](int& index, Access& access, int64_t each) {
    Value value = graph.values()[index];
    if (value.shape[dim] == 1) return;
    value.offset += begin * each * value.strides[dim];
    value.shape[dim] = (end - begin) * each;
    access.value = index = view_value(graph, value);
  };
  if (dim == 2) body.first_query += begin;
  view(body.q, part.accesses[0], times);
  if (dim != 2) view(body.k, part.accesses[1], 1), view(body.v, part.accesses[2], 1);
  const size_t out = body.mask < 0 ? 3 : 4;
  if (body.mask >= 0) view(body.mask, part.accesses[3], times);
  view(body.out, part.accesses[out], times);
  if (body.states >= 0) view(body.states, part.accesses[out + 1], times);
  part.flops = stage.flops * share;
  part.bytes = bytes_of(graph, {body.q, body.k, body.v, body.out});
  return part;
}

int64_t count_across(const Graph& graph, const Stage& stage, const Target& target) {
  const int64_t count = graph.values()[std::get<AttentionStage>(stage.body).k].shape[across(graph, stage)];
  int64_t parts = std::clamp<int64_t>(wholes(target.workers, stage.extent), 1, count);
  while (count % parts != 0) ++parts;
  return parts;
}

std::vector<Stage> parts_across(Graph& graph, const Stage& stage, const Target& target) {
  const size_t dim = across(graph, stage);
  const int64_t count = graph.values()[std::get<AttentionStage>(stage.body).k].shape[dim];
  const int64_t parts = count_across(graph, stage, target);
  if (parts == 1) return {stage};
  std::vector<Stage> all;
  for (int64_t part = 0; part < parts; ++part)
    all.push_back(attention_part(graph, stage, dim, count / parts * part, count / parts * (part + 1),
                                 1 / static_cast<double>(parts)));
  return all;
}

}  // namespace ark::compiler
