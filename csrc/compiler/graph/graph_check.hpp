// Validity checks of nodes and graphs. Graph alone calls the checks; fail_node and the shape rules serve everyone who
// reads nodes.
#pragma once

#include <string>

#include "compiler/graph/graph.hpp"

namespace ark::compiler {

// Throws Error(invalid_argument): "plan: mul of layers.0.mlp (model.py:31): ...".
[[noreturn]] void fail_node(const Node& node, const std::string& what);

// Checks the node's operands and results: number, types, shapes, attributes, and that its output may be written.
void check_node(const Graph& graph, const Node& node);

// Checks that every byte of a temporary that a node reads was written by an earlier node.
void check_written_before_read(const Graph& graph);

std::string to_string(const Shape& shape);  // "[2, 3]"

// The shape to which two operand shapes broadcast; throws (fail_node) if they do not.
Shape broadcast(const Node& node, const Shape& a, const Shape& b);
// Whether `from` broadcasts to exactly `to`.
bool broadcasts_to(const Shape& from, const Shape& to);

bool is_reduction(const std::string& op);
bool is_collective(const std::string& op);
// The dimensions that a reduction reduces, in increasing order; all of them if its attribute names none.
std::vector<int> reduced_dims(const Node& node, int rank);

}  // namespace ark::compiler
