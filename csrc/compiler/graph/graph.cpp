// Builds a graph. Buffers, values and nodes are checked as they are added, so that an error names what caused it. The
// rules of each operator are in graph_check.cpp.
#include "compiler/graph/graph.hpp"

#include <algorithm>

#include "compiler/graph/graph_check.hpp"
#include "util/error.hpp"
#include "util/format.hpp"

namespace ark::compiler {

namespace {

template <typename T>
const T* find_attribute(const Node& node, const std::string& name) {
  const auto found = node.attributes.find(name);
  if (found == node.attributes.end()) return nullptr;
  const T* value = std::get_if<T>(&found->second);
  if (value == nullptr) fail_node(node, "attribute '" + name + "' has the wrong type");
  return value;
}

template <class... Args>
[[noreturn]] void fail_value(fmt::format_string<Args...> pattern, const Args&... args) {
  throw Error(ErrorKind::invalid_argument, "plan: a value " + formatted(pattern, args...));
}

}  // namespace

int64_t Value::elements() const {
  int64_t product = 1;
  for (int64_t size : shape) product *= size;
  return product;
}

int64_t Node::integer(const std::string& name, int64_t otherwise) const {
  const auto* value = find_attribute<int64_t>(*this, name);
  return value != nullptr ? *value : otherwise;
}

double Node::real(const std::string& name, double otherwise) const {
  const auto found = attributes.find(name);
  if (found != attributes.end() && std::holds_alternative<int64_t>(found->second)) {
    return static_cast<double>(std::get<int64_t>(found->second));
  }
  const auto* value = find_attribute<double>(*this, name);
  return value != nullptr ? *value : otherwise;
}

std::string Node::text(const std::string& name) const {
  const auto* value = find_attribute<std::string>(*this, name);
  return value != nullptr ? *value : "";
}

bool Node::flag(const std::string& name, bool otherwise) const {
  const auto* value = find_attribute<bool>(*this, name);
  return value != nullptr ? *value : otherwise;
}

std::vector<int64_t> Node::integers(const std::string& name) const {
  const auto* value = find_attribute<std::vector<int64_t>>(*this, name);
  return value != nullptr ? *value : std::vector<int64_t>{};
}

int Graph::add_buffer(const Buffer& buffer) {
  const bool temporary = buffer.kind == Buffer::Kind::temporary;
  std::string wrong;
  if (buffer.bytes <= 0) wrong = formatted("has {} bytes", buffer.bytes);
  if (!temporary && buffer.argument < 0) wrong = "is an input or output without a position";
  if (temporary && buffer.argument >= 0) wrong = "is a temporary with the position of an argument";
  if (buffer.parameter && (buffer.kind != Buffer::Kind::input || buffer.mutated)) {
    wrong = "is a parameter, but not an input that stays what it is";
  }
  if (!wrong.empty()) {
    throw Error(ErrorKind::invalid_argument, formatted("plan: buffer {} {}", buffers_.size(), wrong));
  }
  buffers_.push_back(buffer);
  if (buffer.kind == Buffer::Kind::input) inputs_ = std::max(inputs_, buffer.argument + 1);
  if (buffer.kind == Buffer::Kind::output) outputs_ = std::max(outputs_, buffer.argument + 1);
  return static_cast<int>(buffers_.size()) - 1;
}

int Graph::add_value(const Value& value) {
  if (value.buffer >= static_cast<int>(buffers_.size())) {
    fail_value("lies on buffer {} of {}", value.buffer, buffers_.size());
  }
  if (value.strides.size() != value.shape.size()) {
    fail_value("has {} dimensions and {} strides", value.shape.size(), value.strides.size());
  }
  if (value.is_literal()) {
    if (!value.shape.empty()) fail_value("without a buffer (a literal) has dimensions");
  } else {
    int64_t low = value.offset, high = value.offset;
    for (size_t i = 0; i < value.shape.size(); ++i) {
      if (value.shape[i] <= 0) {
        fail_value("has a dimension of length {}; empty tensors fall back", value.shape[i]);
      }
      const int64_t reach = (value.shape[i] - 1) * value.strides[i];
      (reach < 0 ? low : high) += reach;
    }
    const int64_t bytes = buffers_[value.buffer].bytes;
    if (low < 0 || (high + 1) * size_of(value.type) > bytes) {
      fail_value("reaches elements {} to {} of type {}, outside buffer {} of {} bytes", low, high, name_of(value.type),
                 value.buffer, bytes);
    }
  }
  values_.push_back(value);
  return static_cast<int>(values_.size()) - 1;
}

int Graph::add_node(const Node& node) {
  check_node(*this, node);
  nodes_.push_back(node);
  return static_cast<int>(nodes_.size()) - 1;
}

void Graph::check() const {
  check_written_before_read(*this);
}

}  // namespace ark::compiler
