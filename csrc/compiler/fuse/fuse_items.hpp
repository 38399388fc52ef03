// The registers of a row program as they come about: equal loads, literals and indices are one register, conversions
// that change nothing are none.
#pragma once

#include <string>
#include <vector>

#include "compiler/fuse/fuse_dependencies.hpp"
#include "compiler/fuse/fuse_rows.hpp"
#include "compiler/graph/graph.hpp"

namespace ark::compiler {

class RowItems {
 public:
  RowItems(const Graph& graph, const Dependencies& dependencies, std::vector<RowDraft::Item>& items)
      : graph_(graph), dependencies_(dependencies), items_(items) {}

  void set_dimensions(size_t dimensions) { dimensions_ = dimensions; }

  // Each returns the number of the item.
  int push(RowDraft::Item item);
  int literal(double value, ScalarType type);
  int op(const std::string& name, std::vector<int> args, ScalarType type, int node);
  int load(IndexFunction function, int node);
  int index(size_t dimension);
  int scaled(int arg, int64_t factor, int node);  // of int64
  // What `function` reads of an inlined node's result, computed; -1: it reads it in a way that has no formula.
  int inlined(const IndexFunction& function, int node);

 private:
  const Graph& graph_;
  const Dependencies& dependencies_;
  std::vector<RowDraft::Item>& items_;
  size_t dimensions_ = 0;
};

}  // namespace ark::compiler
