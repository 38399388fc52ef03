// The common index space of row nodes: which dimension of one node corresponds to which dimension of another.
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
  Shape shape;                 // its iteration space
  std::vector<Shape> strides;  // of each operand over `shape` (0: broadcast); empty for literals
  Shape out;                   // strides of its result; 0 where reduced
  std::vector<bool> reduced;   // by dimension
  std::vector<int> writer;     // by operand: the member that computes it, or one of
  static constexpr int kLoad = -1, kLiteral = -2, kInlined = -3, kParts = -4;
  std::vector<int> source;  // dimension -> the node's own dimension (the same for both halves of a cut one)
  std::vector<int> map;     // dimension -> dimension of the space, or -1 (length 1)

  // An operand (kParts) in which several members wrote an equal part each: a concatenation. `dim` counts the parts.
  struct Parts {
    size_t operand = 0;
    std::vector<int> writers;
    size_t dim = 0;
  };
  std::vector<Parts> parts;
};

RowNode loop_nest(const Graph& graph, const Dependencies& dependencies, int node);
// Cuts dimension d into two: `count` parts, and the index inside a part.
void cut(RowNode& member, size_t d, int64_t count);

struct RowSpace {
  std::vector<RowNode> members;
  Shape sizes;
  int start = 0;  // the member with the largest loop nest
};

// Returns false if values do not connect the nodes or their loops do not match.
bool find_space(const Graph& graph, const Dependencies& dependencies, const std::vector<int>& nodes, RowSpace& space);

}  // namespace ark::compiler
