// Describes matrices to a Hopper GPU's bulk copy engine (TMA), which loads tiles of them without address computation in
// the kernel.
#pragma once

#include <cstdint>

#include "cuda/fused/matmul_shape.cuh"

namespace ark::ops {

// Describes `lines` of `length` adjacent two-byte elements, `stride` elements apart, in boxes of `box_lines` lines of
// 128 bytes. Reads outside of the matrix give zeros.
device::TensorMap map_of(const void* data, int64_t length, int64_t lines, int64_t stride, int box_lines);

// The number of tiles of size `whole` that hold `count`.
inline int64_t in_wholes(int64_t count, int64_t whole) {
  return (count + whole - 1) / whole;
}

}  // namespace ark::ops
