// The values that make_stages adds to a graph: views of its buffers, and literals.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compiler/graph/graph.hpp"

namespace ark::compiler {

bool same_bits(double a, double b);  // 0.0 and -0.0 differ; NaN equals itself

// Returns the index of an equal value, which is added if there is none.
int view_value(Graph& graph, const Value& view);
int literal_value(Graph& graph, double literal, ScalarType type);

int64_t line_elements(const Value& value);  // elements per cache line
double bytes_of(const Graph& graph, const std::vector<int>& values);

// Broadcasts the value to `lead` dimensions before its own last `kept`, with length 1 where it does not vary.
Value with_lead(Value value, const Shape& lead, size_t kept);
// merges() says whether dimension `outer` and the next one, of length `inner_size`, form one dimension; merge() merges
// them.
bool merges(const Value& value, size_t outer, int64_t inner_size);
void merge(Value& value, size_t outer);

// The first three distinct origins of these nodes.
std::string origins(const Graph& graph, const std::vector<int>& nodes);

}  // namespace ark::compiler
