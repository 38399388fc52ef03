// See stage_moves.hpp.
#include "compiler/graph/stage_moves.hpp"

#include <algorithm>

#include "compiler/graph/box.hpp"

namespace ark::compiler {

bool conflict(const Graph& graph, const Stage& a, const Stage& b) {
  const auto& values = graph.values();
  return std::any_of(a.accesses.begin(), a.accesses.end(), [&](const Access& mine) {
    return std::any_of(b.accesses.begin(), b.accesses.end(), [&](const Access& other) {
      return (mine.write || other.write) && values[mine.value].buffer == values[other.value].buffer &&
             overlap(box_of(values[mine.value]), box_of(values[other.value]));
    });
  });
}

bool apart_from(const Graph& graph, const Stage& stage, const std::vector<Stage>& stages, size_t first, size_t last) {
  return std::none_of(stages.begin() + static_cast<std::ptrdiff_t>(first),
                      stages.begin() + static_cast<std::ptrdiff_t>(last),
                      [&](const Stage& other) { return conflict(graph, stage, other); });
}

void join_names(Stage& to, const Stage& from) {
  to.name += ", " + from.name;
  if (!from.origin.empty()) to.origin += (to.origin.empty() ? "" : "; ") + from.origin;
}

}  // namespace ark::compiler
