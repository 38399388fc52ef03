// The bytes of a buffer that a value or a tile of it touches, as a strided box: {offset, dimensions (stride, count),
// width of a run}.
//
// Overlap is exact for any strides while it takes few steps. If it would take more, residues modulo the strides may
// still separate the boxes; otherwise the answer is true. A false positive costs an unneeded event; a false negative
// would corrupt the result. Dimensions that are contiguous are merged, so contiguous memory is one run whatever its
// shape.
#pragma once

#include <array>
#include <cstdint>
#include <functional>

#include "compiler/graph/graph.hpp"
#include "compiler/graph/stage.hpp"

namespace ark::compiler {

struct Box {
  static constexpr int most = 6;
  struct Dimension {
    int64_t stride = 0;  // bytes
    int64_t count = 0;
    bool operator==(const Dimension&) const = default;
  };
  int64_t offset = 0;  // bytes from the start of the buffer
  int64_t width = 0;   // bytes in a run; 0: touches nothing
  int depth = 0;
  bool exact = true;                         // false: covers more than is touched (too many dimensions)
  std::array<Dimension, most> dimensions{};  // by decreasing stride

  bool empty() const { return width == 0; }
  bool contiguous() const { return depth == 0; }
  int64_t end() const;    // one past the last byte
  int64_t bytes() const;  // bytes touched, if runs do not overlap
  bool operator==(const Box& other) const;
};

// The bytes that tile [begin, end) of `stage` touches through `access`.
Box box_of(const Graph& graph, const Stage& stage, const Access& access, int64_t begin, int64_t end);
// The bytes of the whole value.
Box box_of(const Value& value);

bool overlap(const Box& a, const Box& b);
// Values on different buffers never overlap, and a literal overlaps nothing.
bool overlap(const Value& a, const Value& b);
// Whether two indices of the value may address the same byte (an expanded value, for example).
bool overlaps_itself(const Value& value);
// Whether `outer` contains every byte of `inner`. May return false although it does.
bool covers(const Box& outer, const Box& inner);
// Calls visit(offset, rows, stride) for groups of `rows` runs of box.width bytes, in address order.
void each_piece(const Box& box, const std::function<void(int64_t offset, int64_t rows, int64_t stride)>& visit);

}  // namespace ark::compiler
