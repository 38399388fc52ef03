// The common index space of row nodes: which dimension of which node is which.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "compiler/fuse/fuse_dependencies.hpp"
#include "compiler/graph/graph.hpp"

namespace ark::compiler {

// One node and its loop nest.
struct RowNode {
  int node = -1;
  Shape shape;                 // what it iterates over
  std::vector<Shape> strides;  // of each operand over `shape` (0: broadcast); empty for literals
  Shape out;                   // of its result; 0 where reduced
  std::vector<bool> reduced;   // by dimension
  std::vector<int> writer;     // by operand: the member whose result it is, or
  static constexpr int kLoad = -1, kLiteral = -2, kInlined = -3, kParts = -4;
  std::vector<int> source;  // dimension -> the node's own (two for one that was cut into parts)
  std::vector<int> map;     // dimension -> dimension of the space, or -1 (length 1)

  // An operand (kParts) that several members wrote, each an equal part: a concatenation. Dimension `dim` counts parts.
  struct Parts {
    size_t operand = 0;
    std::vector<int> writers;
    size_t dim = 0;
  };
  std::vector<Parts> parts;
};

RowNode loop_nest(const Graph& graph, const Dependencies& dependencies, int node);
// Dimension d becomes two: `count` parts, and what is in one.
void cut(RowNode& member, size_t d, int64_t count);

struct RowSpace {
  std::vector<RowNode> members;
  Shape sizes;
  int start = 0;  // the member with the largest loop nest
};

// False where the nodes are not connected by values or their loops do not fit.
bool find_space(const Graph& graph, const Dependencies& dependencies, const std::vector<int>& nodes, RowSpace& space);

}  // namespace ark::compiler
