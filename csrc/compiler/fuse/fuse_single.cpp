// Stages of one node: the table of the functions that make them; attention, collectives, checks. Products and indexed
// operators have files of their own; see fuse_single.hpp.
#include "compiler/fuse/fuse_single.hpp"

#include <algorithm>
#include <iterator>
#include <string_view>

#include "compiler/fuse/fuse_views.hpp"
#include "compiler/graph/graph_check.hpp"

namespace ark::compiler {

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
  body.nan_rows = node.flag("nan_rows");
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

Stage collective_stage(Graph& graph, const Node& node) {
  Stage stage;
  stage.body = CollectiveStage{node.inputs[0], node.outputs[0]};
  stage.accesses = {{node.inputs[0], -1, false}, {node.outputs[0], -1, true}};
  stage.bytes = bytes_of(graph, {node.inputs[0], node.outputs[0]});
  stage.kind = "collective";
  stage.name = node.op;
  return stage;
}

Stage stop_stage(Graph& graph, const Node& node) {
  Stage stage;
  stage.body = StopStage{node.inputs[0]};
  stage.accesses = {{node.inputs[0], -1, false}};
  stage.bytes = bytes_of(graph, {node.inputs[0]});
  stage.replicable = true;
  stage.kind = stage.name = "stop";
  return stage;
}

Stage check_stage(Graph&, const Node& node) {
  Stage stage;
  stage.body = CheckStage{node.inputs[0], node.outputs[0]};
  stage.accesses = {{node.inputs[0], -1, false}, {node.outputs[0], -1, true}};
  stage.bytes = 2;
  stage.kind = stage.name = "check";
  return stage;
}

struct Maker {
  std::string_view op;
  Stage (*make)(Graph&, const Node&);
};
constexpr Maker kMakers[] = {
    {"matmul", matmul_stage},
    {"dequant_matmul", dequant_matmul_stage},
    {"scaled_matmul", scaled_matmul_stage},
    {"attention", attention_stage},
    {"gather", gather_stage},
    {"scatter", scatter_stage},
    {"topk", select_stage},
    {"cumsum", scan_stage},
    {"cumprod", scan_stage},
    {"embedding_bag", bag_stage},
    {"experts", experts_stage},
    {"check", check_stage},
    {"stop", stop_stage},
    {"all_reduce", collective_stage},
    {"all_gather", collective_stage},
    {"reduce_scatter", collective_stage},
    {"all_to_all", collective_stage},
};

}  // namespace

Stage single_stage(Graph& graph, int index) {
  const Node node = graph.nodes()[index];
  const Maker* maker = std::ranges::find(kMakers, node.op, &Maker::op);
  if (maker == std::end(kMakers)) fail_node(node, "has no stage");
  Stage stage = maker->make(graph, node);
  if (is_collective(node.op) || node.op == "check") stage.node = index;
  stage.origin = node.origin;
  return stage;
}

}  // namespace ark::compiler
