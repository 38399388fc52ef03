// Builds the items of row programs. An iota read through a view becomes a sum over the indices of the space; a fill
// becomes its literal.
#include "compiler/fuse/fuse_items.hpp"

#include <algorithm>
#include <utility>

#include "compiler/fuse/fuse_views.hpp"

namespace ark::compiler {

int RowItems::push(RowDraft::Item item) {
  items_.push_back(std::move(item));
  return static_cast<int>(items_.size()) - 1;
}

int RowItems::literal(double value, ScalarType type) {
  for (size_t i = 0; i < items_.size(); ++i) {
    const auto& item = items_[i];
    if (item.kind == RowProgram::Instruction::Kind::literal && same_bits(item.literal, value) && item.type == type)
      return static_cast<int>(i);
  }
  RowDraft::Item item;
  item.kind = RowProgram::Instruction::Kind::literal;
  item.literal = value;
  item.type = type;
  item.varies = std::vector<bool>(dimensions_, false);
  return push(std::move(item));
}

int RowItems::op(const std::string& name, std::vector<int> args, ScalarType type, int node) {
  if (name == "cast" || name == "copy") {
    const ScalarType from = items_[args[0]].type;
    const bool widens = type == ScalarType::f32 && is_floating(from);
    if (from == type || widens) return args[0];
  }
  RowDraft::Item item;
  item.name = name == "copy" ? "cast" : name;
  item.type = type;
  item.node = node;
  item.varies = std::vector<bool>(dimensions_, false);
  for (int arg : args) {
    for (size_t d = 0; d < item.varies.size(); ++d) {
      if (items_[arg].varies[d]) item.varies[d] = true;
    }
  }
  item.args = std::move(args);
  return push(std::move(item));
}

int RowItems::load(IndexFunction function, int node) {
  for (size_t i = 0; i < items_.size(); ++i) {
    if (items_[i].kind == RowProgram::Instruction::Kind::load && items_[i].function == function)
      return static_cast<int>(i);
  }
  RowDraft::Item item;
  item.kind = RowProgram::Instruction::Kind::load;
  item.type = function.type;
  item.node = node;
  item.varies = std::vector<bool>(dimensions_, false);
  for (size_t d = 0; d < item.varies.size(); ++d) item.varies[d] = function.strides[d] != 0;
  item.function = std::move(function);
  return push(std::move(item));
}

// Computes the element of an iota or fill that `function` reads: start + step * its position.
int RowItems::inlined(const IndexFunction& function, int node) {
  const Node& writer = graph_.nodes()[dependencies_.inlined_writer[function.buffer]];
  const Value& written = graph_.values()[writer.outputs[0]];
  if (written.type != function.type) return -1;
  if (writer.op != "iota") {
    const Value& fill = graph_.values()[writer.inputs[0]];
    return op("cast", {literal(fill.literal, fill.type)}, written.type, node);
  }
  const int64_t stride = written.shape[0] > 1 ? written.strides[0] : 1;
  const int64_t step = writer.integer("step", 1);
  int64_t first = function.offset - written.offset;
  if (first % stride != 0) return -1;
  first = writer.integer("start") + first / stride * step;
  int sum = -1;
  for (size_t d = 0; d < function.strides.size(); ++d) {
    if (function.strides[d] == 0) continue;
    if (function.strides[d] % stride != 0) return -1;
    const int term = scaled(index(d), function.strides[d] / stride * step, node);
    sum = sum < 0 ? term : op("add", {sum, term}, ScalarType::i64, node);
  }
  const int constant = literal(static_cast<double>(first), ScalarType::i64);
  if (sum < 0) {
    sum = constant;
  } else if (first != 0) {
    sum = op("add", {sum, constant}, ScalarType::i64, node);
  }
  return op("cast", {sum}, written.type, node);
}

int RowItems::scaled(int arg, int64_t factor, int node) {
  if (factor == 1) return arg;
  return op("mul", {arg, literal(static_cast<double>(factor), ScalarType::i64)}, ScalarType::i64, node);
}

int RowItems::index(size_t dimension) {
  for (size_t i = 0; i < items_.size(); ++i) {
    const auto& item = items_[i];
    if (item.kind == RowProgram::Instruction::Kind::index && item.args[0] == static_cast<int>(dimension))
      return static_cast<int>(i);
  }
  RowDraft::Item item;
  item.kind = RowProgram::Instruction::Kind::index;
  item.type = ScalarType::i64;
  item.args = {static_cast<int>(dimension)};
  item.varies = std::vector<bool>(dimensions_, false);
  item.varies[dimension] = true;
  return push(std::move(item));
}

}  // namespace ark::compiler
