// Linear searches: a few thousand values, once a compilation.
#include "plan/fuse_views.hpp"

#include <algorithm>

namespace ark::plan {

int view_value(Graph& graph, const Value& view) {
  const auto& values = graph.values();
  for (size_t i = 0; i < values.size(); ++i) {
    const Value& value = values[i];
    if (value.buffer == view.buffer && value.offset == view.offset && value.type == view.type &&
        value.shape == view.shape && value.strides == view.strides && value.literal == view.literal) {
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

}  // namespace ark::plan
