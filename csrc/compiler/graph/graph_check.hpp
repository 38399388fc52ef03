// What makes a node or a graph wrong (used by Graph alone; fail_node by whoever reads nodes).
#pragma once

#include <string>

#include "compiler/graph/graph.hpp"

namespace ark::compiler {

// Throws Error(invalid_argument): "plan: mul of layers.0.mlp (model.py:31): ...".
[[noreturn]] void fail_node(const Node& node, const std::string& what);

// Operands and results of the node's operator: how many, types, shapes, attributes; what it writes may be written.
void check_node(const Graph& graph, const Node& node);

// Every byte of a temporary that a node reads was written by a node before it.
void check_written_before_read(const Graph& graph);

std::string to_string(const Shape& shape);  // "[2, 3]"

// The shape that operands of these shapes broadcast to; throws where they do not (fail_node).
Shape broadcast(const Node& node, const Shape& a, const Shape& b);
// Whether `from` broadcasts to `to` as it is.
bool broadcasts_to(const Shape& from, const Shape& to);

bool is_reduction(const std::string& op);
bool is_collective(const std::string& op);
// The dimensions of its operand that a reduction reduces, rising; all where its attribute names none.
std::vector<int> reduced_dims(const Node& node, int rank);

}  // namespace ark::compiler
