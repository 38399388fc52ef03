// What the copy engine of a Hopper GPU must be told of a matrix.
#pragma once

#include <cstdint>

#include "cuda/fused/matmul_shape.cuh"

namespace ark::ops {

// Of lines of `length` adjacent elements of two bytes, `stride` elements apart, in boxes of `box_lines` lines of 128
// bytes; zeros where the matrix has none.
device::TensorMap map_of(const void* data, int64_t length, int64_t lines, int64_t stride, int box_lines);

// How many tiles of `whole` hold `count`.
inline int64_t in_wholes(int64_t count, int64_t whole) {
  return (count + whole - 1) / whole;
}

}  // namespace ark::ops
