// Test support: builds graphs with dense results in their own buffers, and named views.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "compiler/graph/graph.hpp"
#include "compiler/graph/graph_check.hpp"

namespace ark::compiler {

struct GraphBuilder {
  Graph graph;
  int arguments = 0, results = 0;

  static Shape dense(const Shape& shape) {
    Shape strides(shape.size(), 1);
    for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
    return strides;
  }
  const Value& at(int value) const { return graph.values().at(value); }

  int tensor(Buffer buffer, const Shape& shape, ScalarType type) {
    Value value;
    value.type = type;
    value.shape = shape;
    value.strides = dense(shape);
    buffer.bytes = value.elements() * size_of(type);
    value.buffer = graph.add_buffer(buffer);
    return graph.add_value(value);
  }
  int input(const Shape& shape, ScalarType type = ScalarType::f32, bool mutated = false) {
    Buffer buffer;
    buffer.kind = Buffer::Kind::input;
    buffer.argument = arguments++;
    buffer.mutated = mutated;
    return tensor(buffer, shape, type);
  }
  int parameter(const Shape& shape, ScalarType type = ScalarType::f32) {
    Buffer buffer;
    buffer.kind = Buffer::Kind::input;
    buffer.argument = arguments++;
    buffer.parameter = true;
    return tensor(buffer, shape, type);
  }
  int output(const Shape& shape, ScalarType type = ScalarType::f32) {
    Buffer buffer;
    buffer.kind = Buffer::Kind::output;
    buffer.argument = results++;
    return tensor(buffer, shape, type);
  }
  int temporary(const Shape& shape, ScalarType type = ScalarType::f32) { return tensor({}, shape, type); }
  int literal(double literal, ScalarType type = ScalarType::f32) {
    Value value;
    value.type = type;
    value.literal = literal;
    return graph.add_value(value);
  }

  // Adds a node that writes `out`. Origins call it by its index: "n7".
  int into(int out, const std::string& op, const std::vector<int>& inputs, const Attributes& attributes = {}) {
    graph.add_node({op, inputs, {out}, attributes, "n" + std::to_string(graph.nodes().size())});
    return out;
  }
  int pointwise(const std::string& op, const std::vector<int>& inputs, ScalarType type = ScalarType::f32) {
    Shape shape;
    for (int input : inputs) shape = broadcast({op, {}, {}, {}, ""}, shape, at(input).shape);
    return into(temporary(shape, find_pointwise(op)->boolean ? ScalarType::boolean : type), op, inputs);
  }
  int reduce(const std::string& op, int input, const std::vector<int64_t>& dims, bool keepdim = true,
             ScalarType type = ScalarType::f32) {
    const Node probe{op, {}, {}, {{"dims", dims}}, ""};
    const auto rank = static_cast<int>(at(input).shape.size());
    const std::vector<int> reduced = reduced_dims(probe, rank);
    Shape shape;
    for (int i = 0; i < rank; ++i) {
      const bool gone = std::find(reduced.begin(), reduced.end(), i) != reduced.end();
      if (!gone || keepdim) shape.push_back(gone ? 1 : at(input).shape[i]);
    }
    if (op == "argmax") type = ScalarType::i64;
    if (op == "any") type = ScalarType::boolean;
    return into(temporary(shape, type), op, {input}, {{"dims", dims}, {"keepdim", keepdim}});
  }
  int matmul(int a, int b, int bias = -1, ScalarType type = ScalarType::f32) {
    const Shape &sa = at(a).shape, &sb = at(b).shape;
    Shape shape =
        broadcast({"matmul", {}, {}, {}, ""}, Shape(sa.begin(), sa.end() - 2), Shape(sb.begin(), sb.end() - 2));
    shape.push_back(sa[sa.size() - 2]);
    shape.push_back(sb.back());
    return into(temporary(shape, type), "matmul", bias < 0 ? std::vector<int>{a, b} : std::vector<int>{a, b, bias});
  }
  int copy_out(int value) { return into(output(at(value).shape, at(value).type), "copy", {value}); }

  int view(int value, const Shape& shape, const Shape& strides, int64_t offset = 0) {
    Value view = at(value);
    view.shape = shape;
    view.strides = strides;
    view.offset += offset;
    return graph.add_value(view);
  }
  int permute(int value, const std::vector<int>& order) {
    Shape shape, strides;
    for (int dim : order) {
      shape.push_back(at(value).shape[dim]);
      strides.push_back(at(value).strides[dim]);
    }
    return view(value, shape, strides);
  }
  int transpose(int value) {  // the last two dimensions
    std::vector<int> order;
    for (size_t i = 0; i < at(value).shape.size(); ++i) order.push_back(static_cast<int>(i));
    std::swap(order[order.size() - 1], order[order.size() - 2]);
    return permute(value, order);
  }
  int unsqueeze(int value, int dim) {
    Shape shape = at(value).shape, strides = at(value).strides;
    shape.insert(shape.begin() + dim, 1);
    strides.insert(strides.begin() + dim, 0);
    return view(value, shape, strides);
  }
  int slice(int value, int dim, int64_t begin, int64_t end, int64_t step = 1) {
    Shape shape = at(value).shape, strides = at(value).strides;
    const int64_t offset = begin * strides[dim];
    shape[dim] = (end - begin + step - 1) / step;
    strides[dim] *= step;
    return view(value, shape, strides, offset);
  }
  int expand(int value, const Shape& shape) {
    Shape strides(shape.size(), 0);
    const Value& from = at(value);
    const size_t lead = shape.size() - from.shape.size();
    for (size_t i = 0; i < from.shape.size(); ++i) {
      if (from.shape[i] > 1) strides[lead + i] = from.strides[i];
    }
    return view(value, shape, strides);
  }
  int reshape(int value, const Shape& shape) {  // of a dense value
    return view(value, shape, dense(shape));
  }
};

}  // namespace ark::compiler
