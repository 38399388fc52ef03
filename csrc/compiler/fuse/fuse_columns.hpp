// Which dimensions of a row program's space are its columns, in which order they all stand, and whether fusing pays.
#pragma once

#include <cstddef>
#include <vector>

#include "compiler/fuse/fuse_rows.hpp"
#include "compiler/fuse/fuse_space.hpp"

namespace ark::compiler {

class RowColumns {
 public:
  explicit RowColumns(size_t dimensions = 0) : columns_(dimensions, false) {}

  // One more reduction, over these dimensions in this order, which matters where positions are counted (argmax). False:
  // not together with those before it.
  bool reduce(const std::vector<int>& dims, bool counted);

  // The columns are what is reduced, or what some stores leave out, or (none chosen here) the last dimension. False:
  // the stores do not fit to that.
  bool choose(const RowDraft& draft);

  // False where much would be computed more often than its node does.
  bool worth_it(const Graph& graph, const RowSpace& space) const;

  // Rows by falling strides of the first store of whole rows, so that neighbours are written one after the other; then
  // the columns.
  void order(const RowSpace& space, RowDraft& draft) const;

 private:
  std::vector<bool> columns_;
  std::vector<int> order_;  // of the columns
  bool reduces_ = false;
  bool counted_ = false;
};

}  // namespace ark::compiler
