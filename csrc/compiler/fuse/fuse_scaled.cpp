// Products of float8 rows with float8 weights. Scales of rows and of columns multiply each float32 sum.
//
// Such products have more than 16 rows: with fewer, rows are half types and the product is one with quantized weights
// (fuse_codes.cpp).
#include "compiler/fuse/fuse_single.hpp"
#include "compiler/fuse/fuse_views.hpp"

namespace ark::compiler {

Stage scaled_matmul_stage(Graph& graph, const Node& node) {
  MatmulStage body;
  body.a = node.inputs[0];
  body.b = node.inputs[1];
  body.scale_a = node.inputs[2];
  body.scale_b = node.inputs[3];
  body.out = node.outputs[0];
  body.fast_accum = node.flag("fast_accum");
  const Value &a = graph.values()[body.a], &out = graph.values()[body.out];
  body.m = out.shape[0];
  body.n = out.shape[1];
  body.k = a.shape[1];
  if (node.inputs.size() == 5) {
    Value bias = with_lead(graph.values()[node.inputs[4]], {body.m}, 1);
    body.bias = view_value(graph, bias);
  }
  Stage stage;
  body.axis = body.n >= 4 * body.m ? MatmulStage::Axis::columns : MatmulStage::Axis::rows;
  const bool columns = body.axis == MatmulStage::Axis::columns;
  stage.extent = columns ? body.n : body.m;
  if (columns) stage.grain = line_elements(graph.values()[body.out]);
  stage.accesses = product_accesses(graph, body);
  stage.flops = 2.0 * static_cast<double>(body.m * body.n) * static_cast<double>(body.k);
  stage.bytes = bytes_of(graph, {body.a, body.b, body.out, body.scale_a, body.scale_b});
  stage.kind = "matmul";
  stage.name = "scaled_mm";
  stage.body = body;
  return stage;
}

}  // namespace ark::compiler
