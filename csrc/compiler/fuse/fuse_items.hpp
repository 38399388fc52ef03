// The registers of a row program under construction. Equal loads, literals and indices share one register, and
// conversions that change nothing take none.
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

  // Each returns the item's number.
  int push(RowDraft::Item item);
  int literal(double value, ScalarType type);
  int op(const std::string& name, std::vector<int> args, ScalarType type, int node);
  int load(IndexFunction function, int node);
  int index(size_t dimension);
  int scaled(int arg, int64_t factor, int node);  // of an int64 register
  // Computes what `function` reads of an inlined node's result; -1 if that access has no formula.
  int inlined(const IndexFunction& function, int node);

 private:
  const Graph& graph_;
  const Dependencies& dependencies_;
  std::vector<RowDraft::Item>& items_;
  size_t dimensions_ = 0;
};

}  // namespace ark::compiler
