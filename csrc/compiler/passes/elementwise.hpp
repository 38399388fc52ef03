// Row programs that compute each element from the same element of products' results: what can become an epilogue.
#pragma once

#include <vector>

#include "compiler/graph/graph.hpp"
#include "compiler/graph/stage.hpp"

namespace ark::compiler {

// The loads and the one store of a program that computes each element from the same element of what it loads. No
// loads: the program does something else.
struct Elementwise {
  std::vector<const RowProgram::Instruction*> loads;
  const RowProgram::Instruction* store = nullptr;
};
Elementwise elementwise(const Graph& graph, const RowProgram& program);

// Whether the load takes each element of the product's result `out`, in its type.
bool replaces(const Graph& graph, const RowProgram& program, const RowProgram::Instruction& load, const Value& out);

// The later stage that alone touches the buffer beside stage `at`; -1: none, or several, or an earlier one.
int only_reader(const Graph& graph, const std::vector<Stage>& stages, int at, int buffer);
bool touches(const Graph& graph, const Stage& stage, int buffer);

// The value that an epilogue with this load of the product's result `out`, and this store, stores in its place.
Value finished_value(const Graph& graph, int out, const RowProgram::Instruction& load,
                     const RowProgram::Instruction& store);

}  // namespace ark::compiler
