// Generates loops and addresses for stages that a kernel of the device library computes. The CPU's and the GPU's
// emitters share it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "compiler/emit/cpu/emit_cpu_function.hpp"

namespace ark::compiler {

// Strides of a value's leading dimensions (all but the last `behind`), broadcast to `shape` from the end.
inline std::vector<int64_t> broadcast_strides(const Value& value, size_t behind, const Shape& shape) {
  std::vector<int64_t> strides(shape.size(), 0);
  const size_t leading = value.shape.size() - behind;
  for (size_t i = 0; i < leading && i < shape.size(); ++i) {
    const size_t from = leading - 1 - i, to = shape.size() - 1 - i;
    strides[to] = value.shape[from] == 1 ? 0 : value.strides[from];
  }
  return strides;
}

// The stride of a dimension, counted from the end; 0 if it is absent or broadcast.
inline int64_t stride_from_end(const Value& value, size_t from_end) {
  if (value.shape.size() < from_end) return 0;
  const size_t d = value.shape.size() - from_end;
  return value.shape[d] == 1 ? 0 : value.strides[d];
}

inline std::string at(const std::string& pointer, const std::vector<std::string>& indices,
                      const std::vector<int64_t>& strides) {
  const std::string offset = cpp_offset(indices, strides);
  return offset == "0" ? pointer : pointer + " + " + offset;
}

// The same for a matrix, along whichever of its dimensions is contiguous. `strides`: of its two dimensions. `moved`:
// strides by which a batch moves it.
inline std::string aligned_lines(FunctionWriter& to, int matrix, std::array<int64_t, 2> strides,
                                 std::vector<int64_t> moved) {
  if (strides[0] != 1 && strides[1] != 1) return "false";
  moved.push_back(strides[strides[0] == 1 ? 1 : 0]);
  return to.aligned(matrix, moved);
}

// Loops over dimensions; tiles may cut one of them. A loop of length 1 becomes "0". `long_bodies`: leaves registers to
// the loops' bodies. `type`: of the counters.
class TextNest {
 public:
  TextNest(FunctionWriter& to, const Shape& shape, int axis, const std::string& prefix, bool long_bodies = false,
           const std::string& type = "int64_t")
      : to_(to) {
    for (size_t d = 0; d < shape.size(); ++d) {
      const bool cut = static_cast<int>(d) == axis;
      if (shape[d] == 1 && !cut) {
        names_.push_back("0");
        continue;
      }
      const std::string name = names_.emplace_back(formatted("{}{}", prefix, d));
      const std::string past = !cut          ? formatted("{}", shape[d])
                               : long_bodies ? to_.tile_past(shape[d])
                                             : to_.tile_end(shape[d]);
      to_.open("for ({3} {0} = {1}; {0} < {2}; ++{0})", name, cut ? to_.tile_begin(shape[d]) : "0", past, type);
      ++open_;
    }
  }
  const std::vector<std::string>& names() const { return names_; }
  void close() {
    for (; open_ > 0; --open_) to_.close();
  }

 private:
  FunctionWriter& to_;
  std::vector<std::string> names_;
  int open_ = 0;
};

inline void check_index(FunctionWriter& to, const Value& index) {
  if (is_floating(index.type) || index.type == ScalarType::boolean) to.refuse("its indices are no integers");
}

// Defines `index<n>` from `given<n>`; `wrap`: where that is negative it counts from the end of so many.
inline void define_index(FunctionWriter& to, size_t number, bool wrap, int64_t size) {
  const std::string wrapped = wrap ? formatted("given{} < 0 ? given{} + {} : ", number, number, size) : "";
  to.line("const int64_t index{0} = {1}given{0};", number, wrapped);
}

// Defines `index0` and so on, numbered from the first, and runs the statement `leave` if dimension `dim` of the table
// has no such element.
inline std::string emit_index(FunctionWriter& to, const std::string& place, const Value& table, size_t dim,
                              size_t first, bool wrap, const std::string& leave) {
  const size_t which = dim - first;
  to.line("const int64_t given{} = load_one({});", which, place);
  define_index(to, which, wrap, table.shape[dim]);
  to.line("if (!index_fits(context, index{0}, {1}, given{0}, {2})) {3};", which, table.shape[dim], dim, leave);
  return formatted("index{}", which);
}

inline Shape slice(const Shape& shape, size_t from, size_t to) {
  return Shape(shape.begin() + static_cast<int64_t>(from), shape.begin() + static_cast<int64_t>(to));
}

}  // namespace ark::compiler
