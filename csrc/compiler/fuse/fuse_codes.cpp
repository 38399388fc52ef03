// Products with quantized weights: int8, float8 or 4 bits, with a scale per column or per group of a column's depth.
//
// They have a stage of their own because of the operands they read besides the weights; passes treat them as products.
// With few rows every weight is read once, so tiles cut columns. Many rows, which only a CPU gets, are cut as rows.
#include <algorithm>
#include <string>

#include "compiler/fuse/fuse_single.hpp"
#include "compiler/fuse/fuse_views.hpp"

namespace ark::compiler {

namespace {

std::string name_of(const Codes& codes, ScalarType type) {
  const std::string coded = codes.bits == 4 ? "int4" : type == ScalarType::e4m3 ? "float8" : "int8";
  return coded + " linear";
}

}  // namespace

Stage dequant_matmul_stage(Graph& graph, const Node& node) {
  MatmulStage body;
  size_t next = 2;
  body.a = node.inputs[0];
  body.b = node.inputs[1];
  body.out = node.outputs[0];
  Codes& codes = body.codes;
  codes.bits = static_cast<int>(node.integer("bits"));
  codes.is_signed = node.flag("signed");
  codes.high_first = node.flag("high_first");
  codes.offset = node.integer("offset");
  codes.block = node.integer("block");
  codes.zero_after = node.text("zero") == "after";
  if (node.flag("scaled")) codes.scale = node.inputs[next++];
  if (!node.text("zero").empty()) codes.zero = node.inputs[next++];
  const Value &a = graph.values()[body.a], &out = graph.values()[body.out];
  body.m = out.shape[0];
  body.n = out.shape[1];
  body.k = a.shape[1];
  const int grouped = codes.scale >= 0 ? codes.scale : codes.zero;
  codes.group = grouped < 0 ? body.k : body.k / graph.values()[grouped].shape[0];
  if (node.flag("biased")) body.bias = view_value(graph, with_lead(graph.values()[node.inputs[next]], {body.m}, 1));
  Stage stage;
  body.axis = body.m <= kFewProductRows || body.n >= 4 * body.m ? MatmulStage::Axis::columns : MatmulStage::Axis::rows;
  const bool columns = body.axis == MatmulStage::Axis::columns;
  stage.extent = columns ? body.n : body.m;
  if (columns) stage.grain = std::max(line_elements(graph.values()[body.out]), codes.block);
  stage.accesses = product_accesses(graph, body);
  stage.flops = 2.0 * static_cast<double>(body.m * body.n) * static_cast<double>(body.k);
  stage.bytes = bytes_of(graph, {body.a, body.b, body.out});
  for (const int one : {codes.scale, codes.zero})
    if (one >= 0) stage.bytes += bytes_of(graph, {one});
  stage.kind = "matmul";
  stage.name = name_of(codes, graph.values()[body.b].type);
  stage.body = body;
  return stage;
}

std::vector<Access> product_accesses(const Graph& graph, const MatmulStage& product) {
  const bool columns = product.axis == MatmulStage::Axis::columns;
  const auto cut = [&](int value, bool by_columns) {
    const Value& of = graph.values()[value];
    const size_t dim = of.shape.size() - (columns ? 1 : 2);
    return columns == by_columns && of.shape[dim] > 1 && of.strides[dim] != 0 ? static_cast<int>(dim) : -1;
  };
  std::vector<Access> accesses{{product.a, cut(product.a, false), false}, {product.b, cut(product.b, true), false}};
  if (product.codes.block != 0) accesses[1].axis = columns ? 0 : -1;
  for (const int one : {product.codes.scale, product.codes.zero, product.scale_b})
    if (one >= 0) accesses.push_back({one, cut(one, true), false});
  if (product.scale_a >= 0) accesses.push_back({product.scale_a, cut(product.scale_a, false), false});
  if (product.second.b >= 0) accesses.push_back({product.second.b, cut(product.second.b, true), false});
  for (const int one : {product.bias, product.second.bias})
    if (one >= 0) accesses.push_back({one, cut(one, columns), false});
  accesses.push_back({product.out, cut(product.out, columns), true});
  return accesses;
}

double product_bytes(const Graph& graph, const MatmulStage& product) {
  const double second = product.second.b >= 0 ? bytes_of(graph, {product.second.b}) : 0;
  return bytes_of(graph, {product.a, product.b, product.out}) + second;
}

}  // namespace ark::compiler
