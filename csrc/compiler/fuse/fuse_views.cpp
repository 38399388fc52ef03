// Adds and merges views. Searches are linear: a graph has a few thousand values, and each compilation searches once.
#include "compiler/fuse/fuse_views.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>

namespace ark::compiler {

bool same_bits(double a, double b) {
  return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}

int view_value(Graph& graph, const Value& view) {
  const auto& values = graph.values();
  for (size_t i = 0; i < values.size(); ++i) {
    const Value& value = values[i];
    if (value.buffer == view.buffer && value.offset == view.offset && value.type == view.type &&
        value.shape == view.shape && value.strides == view.strides && same_bits(value.literal, view.literal)) {
      return static_cast<int>(i);
    }
  }
  return graph.add_value(view);
}

int literal_value(Graph& graph, double literal, ScalarType type) {
  Value value;
  value.type = type;
  value.literal = literal;
  return view_value(graph, value);
}

std::string origins(const Graph& graph, const std::vector<int>& nodes) {
  std::vector<std::string> seen;
  for (int node : nodes) {
    const std::string& origin = graph.nodes()[node].origin;
    if (!origin.empty() && std::find(seen.begin(), seen.end(), origin) == seen.end()) seen.push_back(origin);
  }
  std::string text;
  for (size_t i = 0; i < seen.size() && i < 3; ++i) text += (i > 0 ? "; " : "") + seen[i];
  if (seen.size() > 3) text += "; " + std::to_string(seen.size() - 3) + " more";
  return text;
}

int64_t line_elements(const Value& value) {
  return 64 / size_of(value.type);
}

double bytes_of(const Graph& graph, const std::vector<int>& values) {
  double bytes = 0;
  for (int value : values) {
    const Value& of = graph.values()[value];
    if (!of.is_literal()) bytes += static_cast<double>(of.elements() * size_of(of.type));
  }
  return bytes;
}

Value with_lead(Value value, const Shape& lead, size_t kept) {
  while (value.shape.size() < lead.size() + kept) {
    value.shape.insert(value.shape.begin(), 1);
    value.strides.insert(value.strides.begin(), 0);
  }
  for (size_t i = 0; i < value.shape.size(); ++i) {
    if (value.shape[i] == 1 || value.strides[i] == 0) value.strides[i] = 0;
  }
  for (size_t i = 0; i < lead.size(); ++i) {
    if (value.strides[i] == 0) value.shape[i] = 1;
  }
  return value;
}

bool merges(const Value& value, size_t outer, int64_t inner_size) {
  return value.strides[outer] == value.strides[outer + 1] * inner_size;
}

void merge(Value& value, size_t outer) {
  value.shape[outer + 1] *= value.shape[outer];
  value.shape.erase(value.shape.begin() + static_cast<std::ptrdiff_t>(outer));
  value.strides.erase(value.strides.begin() + static_cast<std::ptrdiff_t>(outer));
}

}  // namespace ark::compiler
