// The loop nest of one row node: what it iterates over, and the strides of its operands and result there.
#include <cstddef>

#include "compiler/fuse/fuse_space.hpp"
#include "compiler/graph/graph_check.hpp"

namespace ark::compiler {

namespace {

Shape broadcast_strides(const Value& value, const Shape& shape) {
  Shape strides(shape.size(), 0);
  const size_t lead = shape.size() - value.shape.size();
  for (size_t i = 0; i < value.shape.size(); ++i) {
    if (value.shape[i] > 1) strides[lead + i] = value.strides[i];
  }
  return strides;
}

}  // namespace

RowNode loop_nest(const Graph& graph, const Dependencies& dependencies, int index) {
  const Node& node = graph.nodes()[index];
  const Value& out = graph.values()[node.outputs[0]];
  RowNode result;
  result.node = index;
  const bool reduces = is_reduction(node.op);
  result.shape = reduces ? graph.values()[node.inputs[0]].shape : out.shape;
  result.reduced.assign(result.shape.size(), false);
  result.map.assign(result.shape.size(), -1);
  for (size_t d = 0; d < result.shape.size(); ++d) result.source.push_back(static_cast<int>(d));
  for (int input : node.inputs) {
    const Value& value = graph.values()[input];
    result.strides.push_back(value.is_literal() ? Shape{} : broadcast_strides(value, result.shape));
    result.writer.push_back(value.is_literal()                               ? RowNode::kLiteral
                            : dependencies.inlined_writer[value.buffer] >= 0 ? RowNode::kInlined
                                                                             : RowNode::kLoad);
  }
  if (!reduces) {
    result.out = broadcast_strides(out, result.shape);
    return result;
  }
  const auto rank = static_cast<int>(result.shape.size());
  for (int dim : reduced_dims(node, rank)) result.reduced[dim] = true;
  result.out.assign(result.shape.size(), 0);
  const bool keep = node.flag("keepdim");
  for (int i = 0, o = 0; i < rank; ++i) {
    if (!result.reduced[i] && result.shape[i] > 1) result.out[i] = out.strides[o];
    if (!result.reduced[i] || keep) ++o;
  }
  return result;
}

void cut(RowNode& member, size_t d, int64_t count) {
  const auto at = static_cast<std::ptrdiff_t>(d);
  const int64_t length = member.shape[d] / count;
  const auto cut_strides = [&](Shape& strides) {
    if (strides.empty()) return;  // a literal's
    strides.insert(strides.begin() + at, strides[d] * length);
  };
  for (Shape& strides : member.strides) cut_strides(strides);
  cut_strides(member.out);
  member.shape[d] = length;
  member.shape.insert(member.shape.begin() + at, count);
  member.reduced.insert(member.reduced.begin() + at, static_cast<bool>(member.reduced[d]));
  member.map.insert(member.map.begin() + at, -1);
  member.source.insert(member.source.begin() + at, static_cast<int>(member.source[d]));
}

}  // namespace ark::compiler
