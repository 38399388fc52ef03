// The constraints on every execution order: which node reads another's result, and which nodes may not be reordered.
#pragma once

#include <vector>

#include "compiler/graph/graph.hpp"

namespace ark::compiler {

struct Dependencies {
  struct Edge {
    int node = -1;       // an earlier node
    bool value = false;  // true: its result is read; false: memory is overwritten
  };
  std::vector<std::vector<Edge>> before;  // by node
  std::vector<std::vector<int>> readers;  // by node: later live nodes that read its bytes
  // By node: an iota or fill whose buffer no other node writes. Row programs compute its elements on demand and do not
  // depend on it.
  std::vector<bool> inlined;
  std::vector<bool> live;  // by node: its result is used
  // By buffer: its inlined node, or -1.
  std::vector<int> inlined_writer;
};

Dependencies find_dependencies(const Graph& graph);

// Whether a node can be part of a row program: pointwise operators, reductions and iota.
bool is_row_node(const Node& node);

}  // namespace ark::compiler
