// Matrix products. Leading dimensions are merged wherever the strides of all operands allow it, so that one axis cuts
// both batches and heads, and into rows where all of them use the same b.
#include "compiler/fuse/fuse_single.hpp"

#include <algorithm>

#include "compiler/fuse/fuse_views.hpp"
#include "compiler/graph/graph_check.hpp"
#include "compiler/graph/stage_queries.hpp"

namespace ark::compiler {

namespace {

constexpr int64_t kManyRows = 256;  // from this many on, by rows

bool all_merge(const std::vector<Value*>& values, size_t outer, int64_t inner_size) {
  return std::all_of(values.begin(), values.end(), [&](Value* value) { return merges(*value, outer, inner_size); });
}

// Merges the leading dimensions of all values. `lead` keeps the remaining ones.
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

// Folds the innermost batch dimension into the rows if b is the same for all of it.
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
  const bool wide = m <= kFewProductRows || (m < kManyRows && n >= 4 * m);
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

}  // namespace

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
  // Few rows or columns wait for memory: nothing would be gained.
  body.tf32 = node.flag("tf32") && std::min(body.m, body.n) > kMatvecRows;
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

}  // namespace ark::compiler
