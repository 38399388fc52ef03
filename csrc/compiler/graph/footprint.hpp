// The bytes of its buffer that a Value touches, as runs, and whether two Values may overlap. Works on the bytes alone,
// without tiles; box.hpp describes what a tile touches.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "compiler/graph/graph.hpp"

namespace ark::compiler {

// A Value's bytes, regardless of the order of its dimensions: strides are positive and decreasing, dimensions of length
// 1 or stride 0 are dropped, contiguous neighbors are merged. The innermost `run` bytes are contiguous.
struct Footprint {
  struct Dimension {
    int64_t size, stride;  // stride in bytes
  };
  int64_t first = 0;  // offset in the buffer, in bytes
  int64_t run = 0;    // bytes in a contiguous run
  std::vector<Dimension> dimensions;

  int64_t end() const;     // one past the last byte
  int64_t pieces() const;  // number of runs
};

Footprint footprint(const Value& value);

// [first byte, one past the last) of each run, by increasing index of the outer dimensions. Runs overlap if the value
// overlaps itself.
std::vector<std::pair<int64_t, int64_t>> runs(const Footprint& footprint);

// Returns false only if the two certainly share no byte. Values on different buffers never overlap.
bool may_overlap(const Footprint& a, const Footprint& b);
bool may_overlap(const Value& a, const Value& b);

// Whether two indices of the value may address the same byte (an expanded value, for example).
bool overlaps_itself(const Value& value);

}  // namespace ark::compiler
