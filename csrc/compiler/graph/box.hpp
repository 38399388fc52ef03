// Which bytes of a buffer a value or a tile of it touches: a strided box, {offset, dimensions (stride, count), width of
// a run}.
//
// Overlap is exact for boxes of any strides as long as that takes few steps. Where it would take more, residues modulo
// the strides may still tell boxes apart, and else it says yes: yes costs an event that was not needed, a wrong no
// would cost the result. Dimensions that fit together are merged, so that what is contiguous is one run whatever its
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
  int64_t offset = 0;  // bytes from the buffer's first
  int64_t width = 0;   // bytes of a run; 0: touches nothing
  int depth = 0;
  bool exact = true;                         // false: more than it touches (too many dimensions)
  std::array<Dimension, most> dimensions{};  // by falling stride

  bool empty() const { return width == 0; }
  bool contiguous() const { return depth == 0; }
  int64_t end() const;    // one past the last byte
  int64_t bytes() const;  // touched, where runs do not overlap
  bool operator==(const Box& other) const;
};

// What a tile [begin, end) of `stage` touches through `access`.
Box box_of(const Graph& graph, const Stage& stage, const Access& access, int64_t begin, int64_t end);
// All of a value.
Box box_of(const Value& value);

bool overlap(const Box& a, const Box& b);
// Values of different buffers never overlap, and literals overlap nothing.
bool overlap(const Value& a, const Value& b);
// Whether two indices of the value may be the same byte (an expanded value, say).
bool overlaps_itself(const Value& value);
// Whether every byte of `inner` is one of `outer`; may say no where it is so.
bool covers(const Box& outer, const Box& inner);
// Calls visit(offset, rows, stride) for pieces of `rows` runs of box.width bytes, in order of address.
void each_piece(const Box& box, const std::function<void(int64_t offset, int64_t rows, int64_t stride)>& visit);

}  // namespace ark::compiler
