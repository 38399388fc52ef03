// Several row nodes as one pass over one index space: tried node list by node list, and refused where it would not
// compute what the nodes compute one after the other.
//
// The space's dimensions are found by following values from node to node: a view of a result that is read in another
// shape has the strides of the result, so that equal strides are the same dimension (permuted, unsqueezed, expanded
// views all come out right, and nothing is assumed that is not checked: a value that is taken from a register is read
// by exactly the function of the indices by which it was written).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "compiler/fuse/fuse_dependencies.hpp"
#include "compiler/graph/graph.hpp"
#include "compiler/graph/stage.hpp"

namespace ark::compiler {

// Where the element of a value lies, as a function of the indices of the space.
struct IndexFunction {
  int buffer = -1;
  ScalarType type = ScalarType::f32;
  int64_t offset = 0;
  Shape strides;
  bool operator==(const IndexFunction&) const = default;
};

struct RowDraft {
  struct Item {
    RowProgram::Instruction::Kind kind = RowProgram::Instruction::Kind::op;
    std::string name;
    std::vector<int> args;  // items; index: the dimension
    ScalarType type = ScalarType::f32;
    double literal = 0;
    IndexFunction function;    // load, store
    std::vector<bool> varies;  // with which dimensions; store: which it covers
    int node = -1;
  };
  std::vector<int> nodes;
  Shape sizes;             // of the dimensions
  std::vector<int> order;  // of the dimensions, the columns last
  int inner = 0;           // columns
  bool reduces = false;
  bool in_place = false;  // stores where it loads
  std::vector<Item> items;
};

// `nodes`: in program order. Empty where they cannot be one stage.
std::optional<RowDraft> draft_rows(const Graph& graph, const Dependencies& dependencies, const std::vector<int>& nodes);

// The stage of a draft; may add values to the graph.
Stage finish_rows(Graph& graph, RowDraft draft);

}  // namespace ark::compiler
