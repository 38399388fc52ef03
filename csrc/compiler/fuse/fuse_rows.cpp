// Builds the items (registers) of a row program node by node, in program order, and rejects node lists that cannot be
// one program: a value read by another index function than it was written with, a store that another row might load,
// reductions over different columns, a result that several rows would store, too much recomputation.
#include "compiler/fuse/fuse_rows.hpp"

#include <algorithm>

#include "compiler/fuse/fuse_columns.hpp"
#include "compiler/fuse/fuse_items.hpp"
#include "compiler/fuse/fuse_space.hpp"
#include "compiler/graph/box.hpp"
#include "compiler/graph/graph_check.hpp"

namespace ark::compiler {

namespace {

using Kind = RowProgram::Instruction::Kind;
using Mask = std::vector<bool>;

class RowDrafter {
 public:
  RowDrafter(const Graph& graph, const Dependencies& dependencies, const std::vector<int>& nodes)
      : graph_(graph), dependencies_(dependencies), items_(graph, dependencies, draft_.items) {
    draft_.nodes = nodes;
  }

  std::optional<RowDraft> draft() {
    if (!find_space(graph_, dependencies_, draft_.nodes, space_)) return std::nullopt;
    draft_.sizes = space_.sizes;
    columns_ = RowColumns(draft_.sizes.size());
    items_.set_dimensions(draft_.sizes.size());
    for (const RowNode& member : space_.members) {
      if (!add_member(member)) return std::nullopt;
    }
    if (draft_.reduces && draft_.in_place) return std::nullopt;
    if (!columns_.choose(draft_) || !columns_.worth_it(graph_, space_)) return std::nullopt;
    columns_.order(space_, draft_);
    return std::move(draft_);
  }

 private:
  const Node& node_of(const RowNode& member) const { return graph_.nodes()[member.node]; }
  Mask none() const { return Mask(draft_.sizes.size(), false); }

  IndexFunction function_of(int value, const RowNode& member, const Shape& strides) const {
    const Value& of = graph_.values()[value];
    IndexFunction result{of.buffer, of.type, of.offset, Shape(draft_.sizes.size(), 0)};
    for (size_t d = 0; d < strides.size(); ++d) {
      if (member.map[d] >= 0) result.strides[member.map[d]] = strides[d];
    }
    return result;
  }

  Mask covered(const RowNode& member) const {
    Mask result = none();
    for (size_t d = 0; d < member.map.size(); ++d) {
      if (member.map[d] >= 0 && !member.reduced[d]) result[member.map[d]] = true;
    }
    return result;
  }

  // Whether the result is used outside the stage.
  bool is_stored(int node) const {
    if (graph_.buffer_of(graph_.nodes()[node].outputs[0]).kind != Buffer::Kind::temporary) return true;
    for (int reader : dependencies_.readers[node]) {
      if (!std::binary_search(draft_.nodes.begin(), draft_.nodes.end(), reader)) return true;
    }
    return false;
  }

  // Selects an element of a concatenation from the part that the index falls in.
  int joined(const IndexFunction& function, const RowNode& member, size_t operand) {
    const auto parts = std::find_if(member.parts.begin(), member.parts.end(),
                                    [&](const auto& candidate) { return candidate.operand == operand; });
    const int dim = member.map[parts->dim];
    int result = -1;
    for (size_t p = parts->writers.size(); p-- > 0;) {
      const int writer = parts->writers[p];
      IndexFunction part = function;
      part.strides[dim] = 0;
      part.offset += static_cast<int64_t>(p) * function.strides[dim];
      if (part != functions_[writer]) return -1;
      if (result < 0) {
        result = registers_[writer];
        continue;
      }
      const int number = items_.literal(static_cast<double>(p), ScalarType::i64);
      const int here =
          items_.op("eq", {items_.index(static_cast<size_t>(dim)), number}, ScalarType::boolean, member.node);
      const ScalarType type = is_floating(function.type) ? ScalarType::f32 : function.type;
      result = items_.op("where", {here, registers_[writer], result}, type, member.node);
    }
    return result;
  }

  bool add_member(const RowNode& member) {
    const Node& node = node_of(member);
    std::vector<int> args;
    for (size_t k = 0; k < node.inputs.size(); ++k) {
      const Value& value = graph_.values()[node.inputs[k]];
      if (member.writer[k] == RowNode::kLiteral) {
        args.push_back(items_.literal(value.literal, value.type));
        continue;
      }
      IndexFunction function = function_of(node.inputs[k], member, member.strides[k]);
      if (member.writer[k] == RowNode::kInlined) {
        args.push_back(items_.inlined(function, member.node));
        if (args.back() < 0) return false;
      } else if (member.writer[k] == RowNode::kParts) {
        args.push_back(joined(function, member, k));
        if (args.back() < 0) return false;
      } else if (member.writer[k] >= 0) {
        if (function != functions_[member.writer[k]]) return false;
        args.push_back(registers_[member.writer[k]]);
      } else {
        args.push_back(items_.load(std::move(function), member.node));
      }
    }
    const Value& out = graph_.values()[node.outputs[0]];
    const bool stored = is_stored(member.node);
    // A value that only this stage uses is not rounded. Float8 numbers are held as float32, which is exact.
    const bool wide = out.type == ScalarType::e4m3 || (!stored && is_floating(out.type));
    const ScalarType type = wide ? ScalarType::f32 : out.type;
    int result = -1;
    if (node.op == "iota") {
      const int position =
          out.shape[0] > 1 ? items_.index(static_cast<size_t>(member.map[0])) : items_.literal(0, ScalarType::i64);
      const int product = items_.scaled(position, node.integer("step", 1), member.node);
      const int64_t start = node.integer("start");
      const int first = items_.literal(static_cast<double>(start), ScalarType::i64);
      const int number = start == 0 ? product : items_.op("add", {product, first}, ScalarType::i64, member.node);
      result = items_.op("cast", {number}, type, member.node);
    } else if (is_reduction(node.op)) {
      result = reduce(member, args[0], type);
    } else {
      result = items_.op(node.op, std::move(args), type, member.node);
    }
    if (result < 0) return false;
    registers_.push_back(result);
    functions_.push_back(function_of(node.outputs[0], member, member.out));
    return !stored || store(member, result);
  }

  int reduce(const RowNode& member, int arg, ScalarType type) {
    const Node& node = node_of(member);
    std::vector<int> dims;
    for (size_t d = 0; d < member.shape.size(); ++d) {
      if (member.map[d] >= 0 && member.reduced[d]) dims.push_back(member.map[d]);
      if (member.map[d] < 0 && member.shape[d] > 1) return -1;
    }
    if (dims.empty()) {  // reduces one element each
      if (node.op == "argmax") return items_.literal(0, ScalarType::i64);
      return items_.op("cast", {arg}, type, member.node);
    }
    size_t covers = 0;
    for (int dim : member.map) covers += dim >= 0 ? 1 : 0;
    if (covers != draft_.sizes.size() || !columns_.reduce(dims, node.op == "argmax")) return -1;
    draft_.reduces = true;
    RowDraft::Item item;
    item.kind = Kind::reduce;
    item.name = node.op;
    item.args = {arg};
    item.type = type;
    item.node = member.node;
    item.varies = draft_.items[arg].varies;
    for (int dim : dims) item.varies[dim] = false;
    return items_.push(std::move(item));
  }

  // The element that a store overwrites must have been loaded as that element by the same row, or not at all.
  bool store(const RowNode& member, int result) {
    const int value = node_of(member).outputs[0];
    RowDraft::Item item;
    item.kind = Kind::store;
    item.args = {result};
    item.node = member.node;
    item.function = functions_.back();
    item.type = item.function.type;
    item.varies = covered(member);
    const Box bytes = compiler::box_of(graph_.values()[value]);
    for (const auto& other : stored_) {
      if (other.first == item.function.buffer && overlap(other.second, bytes)) return false;
    }
    const bool all = std::find(item.varies.begin(), item.varies.end(), false) == item.varies.end();
    for (const auto& other : draft_.items) {
      if (other.kind != Kind::load || other.function.buffer != item.function.buffer) continue;
      if (!overlap(box_of(other.function), bytes)) continue;
      if (other.function != item.function || !all) return false;
      draft_.in_place = true;
    }
    stored_.emplace_back(item.function.buffer, bytes);
    items_.push(std::move(item));
    return true;
  }

  Box box_of(const IndexFunction& function) const {
    Value value;
    value.type = function.type;
    value.shape = draft_.sizes;
    value.strides = function.strides;
    value.offset = function.offset;
    return compiler::box_of(value);
  }

  const Graph& graph_;
  const Dependencies& dependencies_;
  RowDraft draft_;
  RowItems items_;
  RowSpace space_;
  RowColumns columns_;
  std::vector<int> registers_;
  std::vector<IndexFunction> functions_;
  std::vector<std::pair<int, Box>> stored_;
};

}  // namespace

std::optional<RowDraft> draft_rows(const Graph& graph, const Dependencies& dependencies,
                                   const std::vector<int>& nodes) {
  return RowDrafter(graph, dependencies, nodes).draft();
}

}  // namespace ark::compiler
