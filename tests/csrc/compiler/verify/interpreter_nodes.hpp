// The interpreter of nodes, included by interpreter.hpp. Products, attention, gather and scatter are shared with the
// interpreter of stages, by a range of one dimension of the result.
#pragma once

#include <algorithm>
#include <limits>

namespace ark::compiler {

// Indices [begin, end) of the result's dimension `axis`. With axis -1, everything.
struct Part {
  int axis = -1;
  int64_t begin = 0, end = 0;
  bool has(const Shape& index) const { return axis < 0 || (index[axis] >= begin && index[axis] < end); }
};

inline double product_at(Memory& memory, const Value& a, const Value& b, const Value* bias, const Shape& index) {
  const size_t r = index.size();
  double sum = bias != nullptr ? read_value(memory, *bias, index) : 0;
  Shape ia = index, ib = index;
  for (int64_t k = 0; k < a.shape.back(); ++k) {
    ia[r - 1] = k;
    ib[r - 2] = k;
    sum += read_value(memory, a, ia) * read_value(memory, b, ib);
  }
  return sum;
}

// `finish`: of a sum and its index.
inline void run_matmul(Memory& memory, const Value& a, const Value& b, const Value* bias, const Value& out, Part part,
                       const std::function<double(double, const Shape&)>& finish = nullptr) {
  each_index(out.shape, [&](const Shape& index) {
    if (!part.has(index)) return;
    const double sum = product_at(memory, a, b, bias, index);
    write_value(memory, out, index, finish ? finish(sum, index) : sum);
  });
}

// Decodes one number of quantised weights.
inline double decoded(const Memory& memory, const std::vector<Value>& values, const MatmulStage& body, int64_t d,
                      int64_t c) {
  const Codes& codes = body.codes;
  const int64_t block = codes.block;
  double code = block != 0 ? read_value(memory, values[body.b], {c / block, d, c % block % (block / 2)})
                           : read_value(memory, values[body.b], {codes.bits == 4 ? d / 2 : d, c});
  if (codes.bits == 4) {
    const auto both = static_cast<int>(code) & 255;
    const bool high = block != 0 ? c % block >= block / 2 : (d % 2 == 1) != codes.high_first;
    const int half = high ? both >> 4 : both & 15;
    code = codes.is_signed && half > 7 ? half - 16 : half;
  }
  const Shape at = {d / codes.group, c};
  const double scale = codes.scale >= 0 ? read_value(memory, values[codes.scale], at) : 1;
  const double zero = codes.zero >= 0 ? read_value(memory, values[codes.zero], at) : 0;
  code -= static_cast<double>(codes.offset);
  return codes.zero_after ? code * scale + zero : (code - zero) * scale;
}

inline void run_dequant_matmul(Memory& memory, const std::vector<Value>& values, const MatmulStage& body, Part part) {
  each_index(values[body.out].shape, [&](const Shape& index) {
    if (!part.has(index)) return;
    double sum = body.bias >= 0 ? read_value(memory, values[body.bias], index) : 0;
    for (int64_t d = 0; d < body.k; ++d)
      sum += read_value(memory, values[body.a], {index[0], d}) * decoded(memory, values, body, d, index[1]);
    write_value(memory, values[body.out], index, sum);
  });
}

// Makes the stage of a node from its attributes. It does not use dequant_matmul_stage(), which it checks.
inline MatmulStage coded_product(const std::vector<Value>& values, const Node& node) {
  MatmulStage body{.a = node.inputs[0], .b = node.inputs[1], .out = node.outputs[0]};
  body.k = values[body.a].shape[1];
  body.codes = {static_cast<int>(node.integer("bits")), node.flag("signed"), node.flag("high_first"),
                node.integer("offset")};
  auto rest = node.inputs.begin() + 2;
  if (node.flag("scaled")) body.codes.scale = *rest++;
  if (!node.text("zero").empty()) body.codes.zero = *rest++;
  if (node.flag("biased")) body.bias = *rest++;
  body.codes.zero_after = node.text("zero") == "after";
  body.codes.block = node.integer("block");
  const int by = body.codes.scale >= 0 ? body.codes.scale : body.codes.zero;
  body.codes.group = by >= 0 ? body.k / values[by].shape[0] : body.k;
  return body;
}

// Writes the new position's rows first, for the heads in `part`.
inline void add_position(Memory& memory, const AttentionStage& body, const std::vector<Value>& values, Part part) {
  const AttentionStage::Added& added = body.added;
  const Value& keys = values[body.k];
  const Value& place = values[added.position];
  auto at = static_cast<int64_t>(read_value(memory, place, Shape(place.shape.size(), 0)));
  if (added.wrap && at < 0) at += added.size;
  at -= (keys.offset - values[added.cache].offset) / keys.strides[2];
  if (at < 0 || at >= keys.shape[2]) return;
  for (const auto& [row, cache] : {std::pair{added.k, body.k}, std::pair{added.v, body.v}}) {
    const Value &from = values[row], &to = values[cache];
    each_index(from.shape, [&](const Shape& index) {
      if (part.has(index)) write_value(memory, to, {0, index[1], at, index[3]}, read_value(memory, from, index));
    });
  }
}

// `part` cuts the batch (axis 0) or the key heads (axis 1).
inline void run_attention(Memory& memory, const AttentionStage& body, const std::vector<Value>& values, Part part) {
  const Value &q = values[body.q], &k = values[body.k], &v = values[body.v], &out = values[body.out];
  const int64_t group = q.shape[1] / k.shape[1], keys = k.shape[2];
  if (body.added.k >= 0) add_position(memory, body, values, part);
  each_index({q.shape[0], q.shape[1], q.shape[2]}, [&](const Shape& index) {
    const Shape cut = {index[0], index[1] / group, index[2]};
    if (!part.has(cut)) return;
    std::vector<double> scores(keys, -std::numeric_limits<double>::infinity());
    double most = -std::numeric_limits<double>::infinity(), total = 0;
    for (int64_t s = 0; s < keys; ++s) {
      if (body.causal && s > index[2] + body.first_query) continue;
      double sum = 0;
      for (int64_t d = 0; d < q.shape[3]; ++d) {
        sum += read_value(memory, q, {index[0], index[1], index[2], d}) * read_value(memory, k, {cut[0], cut[1], s, d});
      }
      sum *= body.scale;
      if (body.mask >= 0) {
        const Value& mask = values[body.mask];
        const double bias = read_value(memory, mask, {index[0], index[1], index[2], s});
        if (mask.type == ScalarType::boolean) {
          if (bias == 0) continue;
        } else {
          sum += bias;
        }
      }
      scores[s] = sum;
      most = std::max(most, sum);
    }
    const double none = body.nan_rows ? std::numeric_limits<double>::quiet_NaN() : 0;  // of a row without positions
    for (double& score : scores) total += score = std::isinf(score) ? 0 : std::exp(score - most);
    const bool part = body.states >= 0;
    if (part) {
      write_value(memory, values[body.states], {index[0], index[1], index[2], 0}, most);
      write_value(memory, values[body.states], {index[0], index[1], index[2], 1}, total);
    }
    for (int64_t d = 0; d < v.shape[3]; ++d) {
      double sum = total == 0 && !part ? none : 0;
      for (int64_t s = 0; s < keys; ++s) {
        if (scores[s] != 0) sum += scores[s] / (part ? 1 : total) * read_value(memory, v, {cut[0], cut[1], s, d});
      }
      write_value(memory, out, {index[0], index[1], index[2], d}, sum);
    }
  });
}

// `part` cuts the batch (axis 0) or the query heads (axis 1).
inline void run_combine(Memory& memory, const CombineStage& body, const std::vector<Value>& values, Part part) {
  const Value &sums = values[body.sums], &states = values[body.states], &out = values[body.out];
  each_index(out.shape, [&](const Shape& at) {
    if (!part.has(at)) return;
    double most = -std::numeric_limits<double>::infinity(), total = 0, sum = 0;
    const auto state = [&](int64_t p, int64_t which) {
      return read_value(memory, states, {p, at[0], at[1], at[2], which});
    };
    for (int64_t p = 0; p < sums.shape[0]; ++p) most = std::max(most, state(p, 0));
    for (int64_t p = 0; p < sums.shape[0]; ++p) {
      if (state(p, 1) == 0) continue;
      const double weight = std::exp(state(p, 0) - most);
      total += weight * state(p, 1);
      sum += weight * read_value(memory, sums, {p, at[0], at[1], at[2], at[3]});
    }
    write_value(memory, out, at, total == 0 && !body.nan_rows ? 0 : sum / total);
  });
}

inline void run_gather(Memory& memory, const GatherStage& body, const std::vector<Value>& values, Part part) {
  const Value &table = values[body.table], &out = values[body.out];
  const auto rank = static_cast<int>(values[body.indices[0]].shape.size());
  each_index(out.shape, [&](const Shape& at) {
    if (!part.has(at)) return;
    const Shape of_index(at.begin() + body.dim, at.begin() + body.dim + rank);
    Shape from(at.begin(), at.begin() + body.dim);
    for (const int index : body.indices) {
      const auto given = static_cast<int64_t>(read_value(memory, values[index], of_index));
      from.push_back(body.wrap && given < 0 ? given + table.shape[from.size()] : given);
    }
    from.insert(from.end(), at.begin() + body.dim + rank, at.end());
    write_value(memory, out, at, read_value(memory, table, from));
  });
}

// `part` cuts the source.
inline void run_scatter(Memory& memory, const ScatterStage& body, const std::vector<Value>& values, Part part) {
  const Value &base = values[body.base], &index = values[body.index], &source = values[body.source];
  each_index(source.shape, [&](const Shape& at) {
    if (!part.has(at)) return;
    Shape to = at;
    const auto given = static_cast<int64_t>(read_value(memory, index, {at[body.dim]}));
    to[body.dim] = body.wrap && given < 0 ? given + base.shape[body.dim] : given;
    write_value(memory, base, to, read_value(memory, source, at));
  });
}

inline void run_node(Memory& memory, const Graph& graph, const Node& node) {
  const auto& values = graph.values();
  const Value& out = values[node.outputs[0]];
  if (const PointwiseOp* op = find_pointwise(node.op)) {
    std::vector<ScalarType> types;
    for (int input : node.inputs) types.push_back(values[input].type);
    each_index(out.shape, [&](const Shape& index) {
      std::vector<double> x;
      for (int input : node.inputs) x.push_back(read_value(memory, values[input], index));
      write_value(memory, out, index, apply_typed(op->name, x, types, out.type));
    });
  } else if (is_reduction(node.op)) {
    const Value& in = values[node.inputs[0]];
    const std::vector<int> dims = reduced_dims(node, static_cast<int>(in.shape.size()));
    Shape rows = in.shape, columns;
    for (int dim : dims) {
      rows[dim] = 1;
      columns.push_back(in.shape[dim]);
    }
    each_index(rows, [&](const Shape& row) {
      Reducer reducer(node.op);
      each_index(columns, [&](const Shape& column) {
        Shape index = row;
        for (size_t i = 0; i < dims.size(); ++i) index[dims[i]] = column[i];
        reducer.add(read_value(memory, in, index));
      });
      Shape to;
      for (int i = 0; i < static_cast<int>(row.size()); ++i) {
        if (node.flag("keepdim") || std::find(dims.begin(), dims.end(), i) == dims.end()) to.push_back(row[i]);
      }
      write_value(memory, out, to, reducer.result(out.type));
    });
  } else if (node.op == "iota") {
    each_index(out.shape, [&](const Shape& index) {
      write_value(memory, out, index, static_cast<double>(node.integer("start") + index[0] * node.integer("step", 1)));
    });
  } else if (node.op == "matmul") {
    run_matmul(memory, values[node.inputs[0]], values[node.inputs[1]],
               node.inputs.size() == 3 ? &values[node.inputs[2]] : nullptr, out, {});
  } else if (node.op == "dequant_matmul") {
    run_dequant_matmul(memory, values, coded_product(values, node), {});
  } else if (node.op == "attention") {
    AttentionStage body{
        node.inputs[0],  node.inputs[1],     node.inputs[2],      node.inputs.size() == 4 ? node.inputs[3] : -1,
        node.outputs[0], node.real("scale"), node.flag("causal"), node.flag("nan_rows")};
    run_attention(memory, body, values, {});
  } else if (node.op == "gather") {
    const auto dim = static_cast<int>(node.integer("dim"));
    const std::vector<int> indices(node.inputs.begin() + 1, node.inputs.end());
    run_gather(memory, {node.inputs[0], indices, node.outputs[0], dim, node.flag("wrap")}, values, {});
  } else if (node.op == "scatter") {
    const auto dim = static_cast<int>(node.integer("dim"));
    run_scatter(memory, {node.outputs[0], node.inputs[1], node.inputs[2], dim, node.flag("wrap")}, values, {});
  } else {
    throw std::logic_error("the interpreter does not know " + node.op);
  }
}

inline void run_nodes(Memory& memory, const Graph& graph) {
  for (const Node& node : graph.nodes()) run_node(memory, graph, node);
}

}  // namespace ark::compiler
