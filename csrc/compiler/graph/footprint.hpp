// Which bytes of its buffer a Value touches: runs, and whether two Values may meet.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "compiler/graph/graph.hpp"

namespace ark::compiler {

// A Value's bytes without regard to the order of its dimensions: strides positive and falling, no dimension of length
// 1 or stride 0, neighbours merged where they are contiguous. The innermost `run` bytes are one piece.
struct Footprint {
  struct Dimension {
    int64_t size, stride;  // stride in bytes
  };
  int64_t first = 0;  // byte of the buffer
  int64_t run = 0;    // bytes of a piece
  std::vector<Dimension> dimensions;

  int64_t end() const;     // one past the last byte
  int64_t pieces() const;  // how many runs
};

Footprint footprint(const Value& value);

// [first byte, one past the last) of each piece, in rising order of the outer dimensions (pieces may overlap each other
// where a value overlaps itself).
std::vector<std::pair<int64_t, int64_t>> runs(const Footprint& footprint);

// False only where it is certain that no byte is in both. Values of different buffers never overlap.
bool may_overlap(const Footprint& a, const Footprint& b);
bool may_overlap(const Value& a, const Value& b);

// Whether two indices of the value may be the same byte (an expanded value, say).
bool overlaps_itself(const Value& value);

}  // namespace ark::compiler
