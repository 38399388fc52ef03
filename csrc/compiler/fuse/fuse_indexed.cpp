// Stages of operators that read or write through indices known at run time. A tile touches a part of the table (sparse)
// of unknown size, so the bytes counted are those of the result. Sorts and running sums are here too, since they are
// cut the same way: along any other dimension.
#include <algorithm>
#include <string>

#include "compiler/fuse/fuse_single.hpp"
#include "compiler/fuse/fuse_views.hpp"

namespace ark::compiler {

namespace {

// The longest dimension outside [from, to), or -1; the last dimension only in whole cache lines.
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

}  // namespace

Stage gather_stage(Graph& graph, const Node& node) {
  const auto& values = graph.values();
  const Value& out = values[node.outputs[0]];
  const auto dim = static_cast<int>(node.integer("dim"));
  const std::vector<int> indices(node.inputs.begin() + 1, node.inputs.end());
  const auto index_rank = static_cast<int>(values[indices[0]].shape.size());
  const auto indexed = static_cast<int>(indices.size());
  const bool along = node.flag("along");
  GatherStage body{node.inputs[0], indices, node.outputs[0], dim, node.flag("wrap"), along};
  Stage stage;
  const int axis = longest_dimension(out, 0, 0, stage.grain);
  if (axis >= 0) stage.extent = out.shape[axis];
  const bool by_index = axis >= dim && axis < dim + index_rank;
  int of_table = axis < 0 || by_index ? -1 : axis < dim ? axis : axis - index_rank + indexed;
  int of_index = by_index ? axis - dim : -1;
  if (along) {
    of_table = axis == dim ? -1 : axis;
    of_index = axis;
  }
  stage.accesses.push_back({body.table, of_table, false, true});
  for (const int index : indices) stage.accesses.push_back({index, of_index, false});
  stage.accesses.push_back({body.out, axis, true});
  stage.bytes = bytes_of(graph, {body.out, body.out}) + bytes_of(graph, indices);
  stage.kind = "gather";
  stage.name = node.text("called");
  if (stage.name.empty()) stage.name = dim == 0 && graph.buffer_of(body.table).parameter ? "embedding" : "gather";
  stage.body = body;
  return stage;
}

Stage scatter_stage(Graph& graph, const Node& node) {
  const auto dim = static_cast<int>(node.integer("dim"));
  const bool along = node.flag("along"), accumulate = node.flag("accumulate");
  ScatterStage body{node.outputs[0], node.inputs[1], node.inputs[2], dim, node.flag("wrap"), along, accumulate};
  const Value& source = graph.values()[body.source];
  Stage stage;
  // Positions are not cut: if several sources go to one position, the last in order wins.
  const int axis = longest_dimension(source, dim, dim + 1, stage.grain);
  if (axis >= 0) stage.extent = source.shape[axis];
  stage.accesses.push_back({body.source, axis, false});
  stage.accesses.push_back({body.index, along ? axis : -1, false});
  stage.accesses.push_back({body.base, axis, true, true});
  stage.bytes = bytes_of(graph, {body.source, body.source, body.index});
  stage.kind = "scatter";
  stage.name = node.text("called");
  if (stage.name.empty()) stage.name = accumulate ? "index_add" : along ? "scatter" : "cache_write";
  stage.body = body;
  return stage;
}

namespace {

// Sorts and running sums take whole rows along dim.
template <typename Body>
Stage row_stage(Graph& graph, const Node& node, const char* kind, Body body) {
  body.input = node.inputs[0];
  body.out = node.outputs[0];
  body.dim = static_cast<int>(node.integer("dim"));
  const Value &input = graph.values()[body.input], &out = graph.values()[body.out];
  Stage stage;
  const int axis = longest_dimension(out, body.dim, body.dim + 1, stage.grain);
  if (axis >= 0) stage.extent = out.shape[axis];
  stage.accesses = {{body.input, axis, false}, {body.out, axis, true}};
  stage.bytes = bytes_of(graph, {body.input, body.out});
  stage.flops = 8 * static_cast<double>(input.elements());
  stage.kind = kind;
  stage.name = node.op;
  stage.body = body;
  return stage;
}

}  // namespace

Stage select_stage(Graph& graph, const Node& node) {
  return row_stage(graph, node, "select", SelectStage{-1, -1, 0, node.flag("largest", true), node.flag("stable")});
}

Stage scan_stage(Graph& graph, const Node& node) {
  return row_stage(graph, node, "scan", ScanStage{-1, -1, 0, node.op == "cumprod"});
}

Stage bag_stage(Graph& graph, const Node& node) {
  BagStage body{node.inputs[0], node.inputs[1], node.inputs[2], -1, node.outputs[0]};
  if (node.inputs.size() == 4) body.weights = node.inputs[3];
  const std::string mode = node.text("mode");
  body.mode = mode == "sum" ? BagStage::Mode::sum : mode == "mean" ? BagStage::Mode::mean : BagStage::Mode::max;
  body.padding = node.integer("padding_idx", -1);
  body.last_offset = node.flag("include_last_offset");
  const Value &out = graph.values()[body.out], &index = graph.values()[body.index];
  Stage stage;
  const int axis = longest_dimension(out, 0, 0, stage.grain);
  if (axis >= 0) stage.extent = out.shape[axis];
  stage.accesses = {{body.table, axis == 1 ? 1 : -1, false, true}, {body.index, -1, false}, {body.offsets, -1, false}};
  if (body.weights >= 0) stage.accesses.push_back({body.weights, -1, false});
  stage.accesses.push_back({body.out, axis, true});
  const double read = static_cast<double>(index.shape[0] * out.shape[1]);
  stage.flops = read;
  stage.bytes = read * static_cast<double>(size_of(graph.values()[body.table].type)) +
                bytes_of(graph, {body.index, body.offsets, body.out});
  stage.kind = "embedding_bag";
  stage.name = "embedding_bag " + mode;
  stage.body = body;
  return stage;
}

Stage experts_stage(Graph& graph, const Node& node) {
  ExpertsStage body{node.inputs[0], node.inputs[1], node.inputs[2], node.outputs[0], node.flag("runs")};
  const Value &table = graph.values()[body.table], &out = graph.values()[body.out];
  const auto rank = static_cast<int>(out.shape.size());
  Stage stage;
  stage.extent = table.shape[2];
  stage.grain = line_elements(out);
  stage.accesses = {
      {body.a, -1, false}, {body.table, 2, false, true}, {body.index, -1, false}, {body.out, rank - 1, true}};
  const int64_t rows = out.elements() / table.shape[2], matrix = table.shape[1] * table.shape[2];
  stage.flops = 2 * static_cast<double>(rows) * static_cast<double>(matrix);
  const auto read = static_cast<double>(std::min(rows, table.shape[0]) * matrix * size_of(table.type));
  stage.bytes = read + bytes_of(graph, {body.a, body.index, body.out});
  stage.kind = "experts";
  stage.name = "grouped product";
  stage.body = body;
  return stage;
}

}  // namespace ark::compiler
