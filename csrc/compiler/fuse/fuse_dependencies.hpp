// What every order of execution has to keep: which node reads what which other wrote, and which may not overtake which.
#pragma once

#include <vector>

#include "compiler/graph/graph.hpp"

namespace ark::compiler {

struct Dependencies {
  struct Edge {
    int node = -1;       // an earlier one
    bool value = false;  // its result is read (else: memory is written again, or written after it was read)
  };
  std::vector<std::vector<Edge>> before;  // by node
  std::vector<std::vector<int>> readers;  // by node: later live nodes that read bytes which it wrote
  // By node: an iota or a fill whose buffer nothing else writes. Row programs compute its elements where they need
  // them, and do not depend on it.
  std::vector<bool> inlined;
  std::vector<bool> live;  // by node: somebody sees what it computes
  // By buffer: its inlined node, or -1.
  std::vector<int> inlined_writer;
};

Dependencies find_dependencies(const Graph& graph);

// Pointwise operators, reductions and iota: what row programs are made of.
bool is_row_node(const Node& node);

}  // namespace ark::compiler
