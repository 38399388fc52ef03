// Decides which dimensions of a row program's space are its columns, in which order all dimensions are nested, and
// whether fusing pays.
#pragma once

#include <cstddef>
#include <vector>

#include "compiler/fuse/fuse_rows.hpp"
#include "compiler/fuse/fuse_space.hpp"

namespace ark::compiler {

class RowColumns {
 public:
  explicit RowColumns(size_t dimensions = 0) : columns_(dimensions, false) {}

  // Adds a reduction over these dimensions, in this order, which matters if positions are counted (argmax). Returns
  // false if it does not combine with earlier reductions.
  bool reduce(const std::vector<int>& dims, bool counted);

  // Takes as columns the reduced dimensions, the ones that some stores lack, or (not here) the last dimension. Returns
  // false if the stores do not match.
  bool choose(const RowDraft& draft);

  // Returns false if much would be computed more often than in separate stages.
  bool worth_it(const Graph& graph, const RowSpace& space) const;

  // Orders rows by decreasing stride of the first full-row store, so that adjacent addresses are written in sequence,
  // then the columns.
  void order(const RowSpace& space, RowDraft& draft) const;

 private:
  std::vector<bool> columns_;
  std::vector<int> order_;  // of the columns
  bool reduces_ = false;
  bool counted_ = false;
};

}  // namespace ark::compiler
