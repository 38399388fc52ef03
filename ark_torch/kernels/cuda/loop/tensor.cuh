// Instructions for attention besides those for products: 8 x 8 tiles transposed between registers, halves of words, and
// a fast exponential.
#pragma once

#include "cuda/loop/group.cuh"
#include "cuda/loop/ptx.cuh"

namespace ark::loop {

// Transposes an 8 x 8 tile of 16-bit elements (lane 4 i + j has elements 2 j and 2 j + 1 of row i).
ARK_LOOP uint32 transpose_tile(uint32 x) {
  uint32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// The low (high) elements of both.
ARK_LOOP uint32 low_halves(uint32 a, uint32 b) {
  return __byte_perm(a, b, 0x5410);
}
ARK_LOOP uint32 high_halves(uint32 a, uint32 b) {
  return __byte_perm(a, b, 0x7632);
}

// 2^x and exp(x) to about 22 bits.
ARK_LOOP float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
ARK_LOOP float fast_exp(float x) {
  return fast_exp2(x * 1.4426950408889634f);
}

ARK_LOOP uint32 ballot(bool condition) {
  return __ballot_sync(~0u, condition);
}
ARK_LOOP void sync_warp() {
  __syncwarp();
}

}  // namespace ark::loop
