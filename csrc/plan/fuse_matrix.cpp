// Stages of one node. Leading dimensions become one wherever the strides of all operands allow, so that one axis cuts
// batches and heads alike.
#include "plan/fuse_matrix.hpp"

#include <algorithm>

#include "plan/fuse_views.hpp"
#include "plan/graph_check.hpp"

namespace ark::plan {

namespace {

constexpr int64_t kFewRows = 16;    // products of so few rows are cut by columns: every weight is read once
constexpr int64_t kManyRows = 256;  // of so many by rows

int64_t line_elements(const Value& value) {
  return 64 / size_of(value.type);
}

double bytes_of(const Graph& graph, const std::vector<int>& values) {
  double bytes = 0;
  for (int value : values) {
    const Value& of = graph.values()[value];
    if (!of.is_literal()) bytes += static_cast<double>(of.elements() * size_of(of.type));
  }
  return bytes;
}

// Broadcast to `lead` dimensions before its own last `kept`: 1 long where it does not vary.
Value with_lead(Value value, const Shape& lead, size_t kept) {
  while (value.shape.size() < lead.size() + kept) {
    value.shape.insert(value.shape.begin(), 1);
    value.strides.insert(value.strides.begin(), 0);
  }
  for (size_t i = 0; i < value.shape.size(); ++i) {
    if (value.shape[i] == 1 || value.strides[i] == 0) value.strides[i] = 0;
  }
  for (size_t i = 0; i < lead.size(); ++i) {
    if (value.strides[i] == 0) value.shape[i] = 1;
  }
  return value;
}

bool merges(const Value& value, size_t outer, int64_t inner_size) {
  return value.strides[outer] == value.strides[outer + 1] * inner_size;
}

// Dimension `outer` and the next become one, in place of the second.
void merge(Value& value, size_t outer) {
  value.shape[outer + 1] *= value.shape[outer];
  value.shape.erase(value.shape.begin() + static_cast<std::ptrdiff_t>(outer));
  value.strides.erase(value.strides.begin() + static_cast<std::ptrdiff_t>(outer));
}

bool all_merge(const std::vector<Value*>& values, size_t outer, int64_t inner_size) {
  return std::all_of(values.begin(), values.end(), [&](Value* value) { return merges(*value, outer, inner_size); });
}

// Merges the leading dimensions of all values; what stays is in `lead`.
void merge_lead(const std::vector<Value*>& values, Shape& lead) {
  for (size_t i = lead.size(); i-- > 0;) {
    const bool single = lead[i] == 1;
    if (!single && (i + 1 >= lead.size() || !all_merge(values, i, lead[i + 1]))) continue;
    for (Value* value : values) {
      if (single) {
        value->shape.erase(value->shape.begin() + static_cast<std::ptrdiff_t>(i));
        value->strides.erase(value->strides.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        merge(*value, i);
      }
    }
    if (!single) lead[i + 1] *= lead[i];
    lead.erase(lead.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

// Where b is the same for all of the innermost batch, that batch is more rows of the others.
bool fold_rows(Value& b, const std::vector<Value*>& all, Shape& lead) {
  if (lead.empty() || b.strides[lead.size() - 1] != 0) return false;
  const size_t last = lead.size() - 1;
  const int64_t m = all[2]->shape[last + 1];  // of the result
  std::vector<Value*> rows = all;
  rows.erase(std::find(rows.begin(), rows.end(), &b));
  if (m > 1 && !all_merge(rows, last, m)) return false;
  const auto at = static_cast<std::ptrdiff_t>(last);
  for (Value* value : rows) {
    if (m > 1) {
      merge(*value, last);
    } else {
      value->shape.erase(value->shape.begin() + at + 1);
      value->strides.erase(value->strides.begin() + at + 1);
    }
  }
  b.shape.erase(b.shape.begin() + at);
  b.strides.erase(b.strides.begin() + at);
  lead.pop_back();
  return true;
}

void choose_axis(const Value& out, const Shape& lead, int64_t m, int64_t n, MatmulStage& body, Stage& stage,
                 int& dimension) {
  using Axis = MatmulStage::Axis;
  const auto longest = std::max_element(lead.begin(), lead.end());
  const int64_t line = line_elements(out);
  const int64_t by_columns = (n + line - 1) / line;
  const bool wide = m <= kFewRows || (m < kManyRows && n >= 4 * m);
  const auto rank = static_cast<int>(lead.size());
  if (longest != lead.end() && (*longest >= 8 || *longest >= std::max(m, by_columns))) {
    body.axis = Axis::batch;
    dimension = static_cast<int>(longest - lead.begin());
    stage.extent = *longest;
  } else if (wide && (by_columns > 1 || m == 1)) {
    body.axis = Axis::columns;
    dimension = rank + 1;
    stage.extent = n;
    stage.grain = line;
  } else {
    body.axis = Axis::rows;
    dimension = rank;
    stage.extent = m;
    stage.grain = m >= kManyRows ? 8 : 1;
  }
}

Stage matmul_stage(Graph& graph, const Node& node) {
  const auto& values = graph.values();
  Value out = values[node.outputs[0]];
  Shape lead(out.shape.begin(), out.shape.end() - 2);
  Value a = with_lead(values[node.inputs[0]], lead, 2), b = with_lead(values[node.inputs[1]], lead, 2), bias;
  out = with_lead(out, lead, 2);
  std::vector<Value*> all = {&a, &b, &out};
  if (node.inputs.size() == 3) {
    bias = with_lead(values[node.inputs[2]], lead, 2);
    all.push_back(&bias);
  }
  merge_lead(all, lead);
  if (fold_rows(b, all, lead)) a.shape[lead.size()] = out.shape[lead.size()];
  MatmulStage body;
  body.m = out.shape[lead.size()];
  body.n = out.shape[lead.size() + 1];
  body.k = a.shape[lead.size() + 1];
  for (int64_t size : lead) body.batch *= size;
  Stage stage;
  int dimension = -1;
  choose_axis(out, lead, body.m, body.n, body, stage, dimension);
  body.a = view_value(graph, a);
  body.b = view_value(graph, b);
  body.out = view_value(graph, out);
  if (node.inputs.size() == 3) body.bias = view_value(graph, bias);
  using Axis = MatmulStage::Axis;
  const auto cut = [&](const Value& value) { return value.strides[dimension] != 0 ? dimension : -1; };
  stage.accesses.push_back({body.a, body.axis == Axis::columns ? -1 : cut(a), false});
  stage.accesses.push_back({body.b, body.axis == Axis::rows ? -1 : cut(b), false});
  if (body.bias >= 0) stage.accesses.push_back({body.bias, cut(bias), false});
  stage.accesses.push_back({body.out, stage.extent > 1 ? dimension : -1, true});
  stage.flops = 2.0 * static_cast<double>(body.batch * body.m * body.n) * static_cast<double>(body.k);
  stage.bytes = bytes_of(graph, {body.a, body.b, body.out});
  stage.kind = "matmul";
  stage.name = body.bias >= 0 ? "linear" : "matmul";
  stage.body = body;
  return stage;
}

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
  GatherStage body{node.inputs[0], node.inputs[1], node.outputs[0], dim};
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
  stage.name = dim == 0 && graph.buffer_of(body.table).parameter ? "embedding" : "gather";
  stage.body = body;
  return stage;
}

Stage scatter_stage(Graph& graph, const Node& node) {
  const auto dim = static_cast<int>(node.integer("dim"));
  ScatterStage body{node.outputs[0], node.inputs[1], node.inputs[2], dim};
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
  stage.name = "cache_write";
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
  } else {
    fail_node(node, "has no stage");
  }
  stage.origin = node.origin;
  return stage;
}

}  // namespace ark::plan
