// The loops that walk a row program's index space; part of emit_cpu_rows.cpp.
//
// Dimensions that all loads and stores step through as through one become one loop. Loops of rows stand outside of
// those of columns; one of the latter goes 16 at a time, or one of rows where only rows lie side by side (a sum over
// the first dimension): each lane is then a row. A row that nothing is reduced over may as well be all there is. For a
// GPU there are no loops but one of rows, over the groups of threads that take one each, and one of columns, over a
// group's threads; indices are taken apart from their number.
#pragma once

#include <string>
#include <vector>

#include "compiler/emit/cpu/emit_cpu_function.hpp"

namespace ark::compiler {

struct RowLoop {
  int64_t size = 1;
  bool column = false;
  bool tiled = false;
  std::vector<int> dims;  // of the program's shape; empty: one column that is no dimension
  std::string name;       // of the index
  std::string begin = "0", end;
};

class RowNest {
 public:
  RowNest(FunctionWriter& to, const RowProgram& program);

  const std::vector<RowLoop>& loops() const { return loops_; }
  const RowLoop& vector() const { return loops_[vector_]; }
  // Whether the loop goes 16 at a time, its index left out of addresses.
  bool is_vector(const RowLoop& loop) const { return !to_.cuda() && &loop == &loops_[vector_]; }
  // Whether the lanes are rows: what is one number a row differs from lane to lane.
  bool across_rows() const { return !to_.cuda() && !loops_[vector_].column; }
  bool has_numbers() const { return reduces_ || numbers_; }  // something is one number a row
  int64_t columns() const;

  static bool accesses(const RowProgram::Instruction& one);
  static int64_t stride(const RowProgram::Instruction& one, const RowLoop& loop);

  void open(const RowLoop& loop);
  // For a GPU: how many rows (columns) the tile has, as text, and the indices of the one numbered `index`.
  std::string count(bool columns) const;
  void take_apart(const std::string& index, bool columns);
  int64_t rows() const;  // of the whole stage
  // The position along a dimension, as lanes.
  std::string position(int dim) const;
  // A column's place in its row, in order of the dimensions; and with the vector's dimension adjacent.
  std::string flat_column() const;
  std::string kept_place() const;
  // Pointer to where `one` begins, over the indices of all loops but the vector's; those of rows alone for a number.
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
