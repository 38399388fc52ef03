// Values that make_stages adds to a graph: views of its buffers, literals.
#pragma once

#include <string>
#include <vector>

#include "plan/graph.hpp"

namespace ark::plan {

// The index of a value equal to it, added where there is none.
int view_value(Graph& graph, const Value& view);
int literal_value(Graph& graph, double literal, ScalarType type);

// Where these nodes come from, each origin once, the first three of them.
std::string origins(const Graph& graph, const std::vector<int>& nodes);

}  // namespace ark::plan
