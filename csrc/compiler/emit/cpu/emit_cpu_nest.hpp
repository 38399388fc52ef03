// The loops over a row program's index space.
//
// Dimensions through which all accesses step as through one are merged. Loops of rows enclose those of columns. One
// column loop is vectorized with 16 lanes, or one row loop if only rows are contiguous (a sum over the first
// dimension): each lane is then a row. Without reductions one row may be the whole space. For a GPU there is one loop
// of rows, over the groups of threads that take a row each, and one of columns, over a group's threads; their indices
// are computed from the flat number.
#pragma once

#include <string>
#include <vector>

#include "compiler/emit/cpu/emit_cpu_function.hpp"

namespace ark::compiler {

struct RowLoop {
  int64_t size = 1;
  bool column = false;
  bool tiled = false;
  std::vector<int> dims;  // of the program's shape; empty: a single column without a dimension
  std::string name;       // of the index variable
  std::string begin = "0", end;
};

class RowNest {
 public:
  RowNest(FunctionWriter& to, const RowProgram& program);

  const std::vector<RowLoop>& loops() const { return loops_; }
  const RowLoop& vector() const { return loops_[vector_]; }
  // Whether the loop is vectorized, with its index left out of addresses.
  bool is_vector(const RowLoop& loop) const { return !to_.cuda() && &loop == &loops_[vector_]; }
  // Whether lanes are rows, so that per-row numbers differ between lanes.
  bool across_rows() const { return !to_.cuda() && !loops_[vector_].column; }
  bool has_numbers() const { return reduces_ || numbers_; }  // there are per-row numbers
  int64_t columns() const;
  int64_t elements() const;                          // of the whole shape
  static constexpr int64_t kManyElements = 1 << 17;  // enough that a GPU's tiles have more elements than threads

  static bool accesses(const RowProgram::Instruction& one);
  static int64_t stride(const RowProgram::Instruction& one, const RowLoop& loop);

  void open(const RowLoop& loop);
  // For a GPU: the number of the tile's rows (columns) as text, and the indices of row (column) `index`.
  std::string count(bool columns) const;
  // `piece`: the index counts pieces of so many columns of the vectorized dimension, and the first one's index results.
  void take_apart(const std::string& index, bool columns, int64_t piece = 1);
  // The largest number of columns of the vectorized dimension of which every tile has a multiple.
  int64_t columns_of_tiles() const;
  // The strides of `one` over all loops but the vectorized one.
  std::vector<int64_t> strides_between_lines(const RowProgram::Instruction& one) const;
  int64_t rows() const;  // of the whole stage
  // The position along a dimension, as lanes.
  std::string position(int dim) const;
  // A column's position in its row in the order of the dimensions, and with the vectorized dimension innermost.
  std::string flat_column() const;
  std::string kept_place() const;
  // Pointer to the first element of `one` over the indices of all loops but the vectorized one; for a per-row number,
  // of the row loops only.
  std::string base(const RowProgram::Instruction& one, bool columns);

 private:
  void look_at_code();
  bool indexed(int dim) const;
  bool continues(const RowLoop& loop, int d, int64_t size, bool column) const;
  void make_loops();
  void choose_vector();
  bool choose_rows();
  int rank() const { return static_cast<int>(program_.shape.size()); }
  std::vector<const RowLoop*> fastest_first(bool columns) const;

  FunctionWriter& to_;
  const RowProgram& program_;
  bool reduces_ = false, numbers_ = false, positions_ = false;
  int inner_ = 0;
  std::vector<RowLoop> loops_;
  size_t vector_ = 0;
};

}  // namespace ark::compiler
