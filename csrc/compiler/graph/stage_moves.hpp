// Whether stages may change places.
#pragma once

#include <vector>

#include "compiler/graph/graph.hpp"
#include "compiler/graph/stage.hpp"

namespace ark::compiler {

// Both touch a byte, and one of them writes it.
bool conflict(const Graph& graph, const Stage& a, const Stage& b);
// No stage of [first, last) conflicts with it.
bool apart_from(const Graph& graph, const Stage& stage, const std::vector<Stage>& stages, size_t first, size_t last);

// What tasks of both do, for people: "matmul, matmul, swiglu", and where that comes from.
void join_names(Stage& to, const Stage& from);

}  // namespace ark::compiler
