// Stages of one node: attention, gather, scatter, collectives.
#include "plan/fuse_single.hpp"

#include <algorithm>

#include "plan/fuse_views.hpp"
#include "plan/graph_check.hpp"

namespace ark::plan {

namespace {

Stage attention_stage(Graph& graph, const Node& node) {
  const auto& values = graph.values();
  Value q = values[node.inputs[0]], k = values[node.inputs[1]], v = values[node.inputs[2]], mask;
  Value out = values[node.outputs[0]];
  const bool masked = node.inputs.size() == 4;
  if (masked) mask = with_lead(values[node.inputs[3]], {q.shape[0], q.shape[1]}, 2);
  const int64_t batch = q.shape[0], heads = k.shape[1];
  const bool one = batch > 1 && merges(q, 0, q.shape[1]) && merges(out, 0, q.shape[1]) && merges(k, 0, heads) &&
                   merges(v, 0, heads) && (!masked || (mask.strides[0] == 0 && mask.strides[1] == 0));
  if (one) {
    for (Value* value : {&q, &k, &v, &out}) {
      merge(*value, 0);
      value->shape.insert(value->shape.begin(), 1);
      value->strides.insert(value->strides.begin(), 0);
    }
  }
  AttentionStage body;
  body.q = view_value(graph, q);
  body.k = view_value(graph, k);
  body.v = view_value(graph, v);
  body.out = view_value(graph, out);
  if (masked) body.mask = view_value(graph, mask);
  body.scale = node.real("scale");
  body.causal = node.flag("causal");
  Stage stage;
  const int axis = q.shape[0] > k.shape[1] ? 0 : 1;
  stage.extent = k.shape[axis];
  stage.accesses = {{body.q, axis, false}, {body.k, axis, false}, {body.v, axis, false}};
  if (masked) stage.accesses.push_back({body.mask, mask.strides[axis] != 0 ? axis : -1, false});
  stage.accesses.push_back({body.out, axis, true});
  const double scores = static_cast<double>(q.shape[0] * q.shape[1] * q.shape[2]) * static_cast<double>(k.shape[2]);
  stage.flops = 2 * scores * static_cast<double>(q.shape[3] + v.shape[3]) * (body.causal ? 0.5 : 1);
  stage.bytes = bytes_of(graph, {body.q, body.k, body.v, body.out});
  stage.kind = stage.name = "attention";
  stage.body = body;
  return stage;
}

// The longest dimension outside [from, to), or none; the last only in whole cache lines.
int longest_dimension(const Value& value, int from, int to, int64_t& grain) {
  int best = -1;
  int64_t most = 1;
  for (int d = 0; d < static_cast<int>(value.shape.size()); ++d) {
    if (d >= from && d < to) continue;
    const bool last = d + 1 == static_cast<int>(value.shape.size());
    const int64_t line = last ? line_elements(value) : 1;
    const int64_t tiles = (value.shape[d] + line - 1) / line;
    if (tiles <= most) continue;
    most = tiles;
    best = d;
    grain = line;
  }
  return best;
}

Stage gather_stage(Graph& graph, const Node& node) {
  const auto& values = graph.values();
  const Value &index = values[node.inputs[1]], &out = values[node.outputs[0]];
  const auto dim = static_cast<int>(node.integer("dim"));
  const auto index_rank = static_cast<int>(index.shape.size());
  GatherStage body{node.inputs[0], node.inputs[1], node.outputs[0], dim, node.flag("wrap")};
  Stage stage;
  const int axis = longest_dimension(out, 0, 0, stage.grain);
  if (axis >= 0) stage.extent = out.shape[axis];
  const bool by_index = axis >= dim && axis < dim + index_rank;
  const int of_table = axis < 0 || by_index ? -1 : axis < dim ? axis : axis - index_rank + 1;
  stage.accesses.push_back({body.table, of_table, false, true});
  stage.accesses.push_back({body.index, by_index ? axis - dim : -1, false});
  stage.accesses.push_back({body.out, axis, true});
  stage.bytes = bytes_of(graph, {body.out, body.out, body.index});
  stage.kind = "gather";
  stage.name = node.text("called");
  if (stage.name.empty()) stage.name = dim == 0 && graph.buffer_of(body.table).parameter ? "embedding" : "gather";
  stage.body = body;
  return stage;
}

Stage scatter_stage(Graph& graph, const Node& node) {
  const auto dim = static_cast<int>(node.integer("dim"));
  ScatterStage body{node.outputs[0], node.inputs[1], node.inputs[2], dim, node.flag("wrap")};
  const Value& source = graph.values()[body.source];
  Stage stage;
  // Positions are not cut: of several sources for one position the last wins, in order.
  const int axis = longest_dimension(source, dim, dim + 1, stage.grain);
  if (axis >= 0) stage.extent = source.shape[axis];
  stage.accesses.push_back({body.source, axis, false});
  stage.accesses.push_back({body.index, -1, false});
  stage.accesses.push_back({body.base, axis, true, true});
  stage.bytes = bytes_of(graph, {body.source, body.source, body.index});
  stage.kind = "scatter";
  stage.name = node.text("called");
  if (stage.name.empty()) stage.name = "cache_write";
  stage.body = body;
  return stage;
}

Stage collective_stage(const Graph& graph, int index) {
  const Node& node = graph.nodes()[index];
  Stage stage;
  stage.body = CollectiveStage{node.inputs[0], node.outputs[0]};
  stage.accesses = {{node.inputs[0], -1, false}, {node.outputs[0], -1, true}};
  stage.bytes = bytes_of(graph, {node.inputs[0], node.outputs[0]});
  stage.node = index;
  stage.kind = "collective";
  stage.name = node.op;
  return stage;
}

}  // namespace

Stage single_stage(Graph& graph, int index) {
  const Node node = graph.nodes()[index];
  Stage stage;
  if (node.op == "matmul") {
    stage = matmul_stage(graph, node);
  } else if (node.op == "attention") {
    stage = attention_stage(graph, node);
  } else if (node.op == "gather") {
    stage = gather_stage(graph, node);
  } else if (node.op == "scatter") {
    stage = scatter_stage(graph, node);
  } else if (is_collective(node.op)) {
    stage = collective_stage(graph, index);
  } else if (node.op == "stop") {
    stage.body = StopStage{node.inputs[0]};
    stage.accesses = {{node.inputs[0], -1, false}};
    stage.bytes = bytes_of(graph, {node.inputs[0]});
    stage.replicable = true;
    stage.kind = stage.name = "stop";
  } else {
    fail_node(node, "has no stage");
  }
  stage.origin = node.origin;
  return stage;
}

}  // namespace ark::plan
