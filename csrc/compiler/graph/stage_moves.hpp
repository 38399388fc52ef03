// Whether stages may be reordered. Passes ask before they move a stage to join it with another one.
#pragma once

#include <vector>

#include "compiler/graph/graph.hpp"
#include "compiler/graph/stage.hpp"

namespace ark::compiler {

// Whether both touch a byte that at least one of them writes.
bool conflict(const Graph& graph, const Stage& a, const Stage& b);
// Whether no stage of [first, last) conflicts with `stage`.
bool apart_from(const Graph& graph, const Stage& stage, const std::vector<Stage>& stages, size_t first, size_t last);

// Joins the names and origins of two stages that share tasks, for reports: "matmul, matmul, swiglu".
void join_names(Stage& to, const Stage& from);

}  // namespace ark::compiler
