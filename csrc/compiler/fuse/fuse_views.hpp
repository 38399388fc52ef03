// Values that make_stages adds to a graph: views of its buffers, literals.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compiler/graph/graph.hpp"

namespace ark::compiler {

bool same_bits(double a, double b);  // 0.0 and -0.0 differ, NaN is itself

// The index of a value equal to it, added where there is none.
int view_value(Graph& graph, const Value& view);
int literal_value(Graph& graph, double literal, ScalarType type);

int64_t line_elements(const Value& value);  // in a cache line
double bytes_of(const Graph& graph, const std::vector<int>& values);

// The value broadcast to `lead` dimensions before its own last `kept`: 1 long where it does not vary.
Value with_lead(Value value, const Shape& lead, size_t kept);
// Whether dimension `outer` and the next, of length `inner_size`, are one dimension; makes them one.
bool merges(const Value& value, size_t outer, int64_t inner_size);
void merge(Value& value, size_t outer);

// Where these nodes come from, each origin once, the first three of them.
std::string origins(const Graph& graph, const std::vector<int>& nodes);

}  // namespace ark::compiler
