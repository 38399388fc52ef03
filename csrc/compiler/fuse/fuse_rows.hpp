// Fuses several row nodes into one pass over one index space. A node list is tried, and rejected if one pass would not
// compute what the nodes compute in sequence.
//
// Dimensions of the space are found by following values from node to node. If a result is read through a view of
// another shape, equal strides mean the same dimension. That covers permuted, unsqueezed and expanded views. Nothing is
// assumed unchecked: a value taken from a register must be read by exactly the index function that wrote it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "compiler/fuse/fuse_dependencies.hpp"
#include "compiler/graph/graph.hpp"
#include "compiler/graph/stage.hpp"

namespace ark::compiler {

// The position of a value's element as a function of the space's indices.
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
    std::vector<int> args;  // items; for an index: the dimension
    ScalarType type = ScalarType::f32;
    double literal = 0;
    IndexFunction function;    // load, store
    std::vector<bool> varies;  // the dimensions it varies with; store: the dimensions it covers
    int node = -1;
  };
  std::vector<int> nodes;
  Shape sizes;             // of the dimensions
  std::vector<int> order;  // of the dimensions, the columns last
  int inner = 0;           // number of columns
  bool reduces = false;
  bool in_place = false;  // stores to elements that it loads
  std::vector<Item> items;
};

// `nodes`: in program order. Returns nullopt if they cannot be one stage.
std::optional<RowDraft> draft_rows(const Graph& graph, const Dependencies& dependencies, const std::vector<int>& nodes);

// Makes the stage of a draft. May add values to the graph.
Stage finish_rows(Graph& graph, RowDraft draft);

}  // namespace ark::compiler
