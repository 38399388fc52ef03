// Who works on something together: a warp, or all threads of a block; and what they put together.
//
// A task's function is called by all kThreads threads of a block, converged, with the same arguments. Shared
// memory that functions use for themselves is workspace(); whoever has used it calls sync() before the next use.
#pragma once

#include "cuda/loop/types.cuh"

namespace ark::loop {

inline constexpr int kWarps = 16;  // of a block; 128 registers a thread
inline constexpr int kThreads = kWarps * 32;

// Bytes of shared memory that a task may use as it likes.
inline constexpr int kWorkspaceBytes = 96 * 1024;
inline constexpr int kWorkspaceAlignment = 1024;  // tile_group.cuh needs it

#if defined(__CUDACC__)

ARK_LOOP char* workspace() {
  extern __shared__ __align__(kWorkspaceAlignment) char dynamic_shared[];
  return dynamic_shared;
}

// All threads of the block.
ARK_LOOP void sync() {
  __syncthreads();
}

ARK_LOOP int thread() {
  return static_cast<int>(threadIdx.x);
}
ARK_LOOP int lane() {
  return static_cast<int>(threadIdx.x) & 31;
}
ARK_LOOP int warp() {
  return static_cast<int>(threadIdx.x) >> 5;
}

ARK_LOOP float shuffle_xor(float x, int mask) {
  return __shfl_xor_sync(~0u, x, mask);
}
ARK_LOOP int64_t shuffle_xor(int64_t x, int mask) {
  return __shfl_xor_sync(~0u, x, mask);
}
ARK_LOOP bool shuffle_xor(bool x, int mask) {
  return __shfl_xor_sync(~0u, static_cast<int>(x), mask) != 0;
}

// Columns of a row over the threads of a warp; rows over warps.
struct Warp {
  static constexpr int kSize = 32, kGroups = kWarps;
  static ARK_LOOP int rank() { return lane(); }
  static ARK_LOOP int group() { return warp(); }

  // What all threads' values combine to, in an order that never changes; all threads get it.
  template <class V, class Combine>
  static ARK_LOOP V all(V x, Combine combine) {
    ARK_UNROLL for (int mask = 16; mask > 0; mask >>= 1) x = combine(x, shuffle_xor(x, mask));
    return x;
  }
};

// Columns over all threads; one row after the other.
struct Block {
  static constexpr int kSize = kThreads, kGroups = 1;
  static ARK_LOOP int rank() { return thread(); }
  static ARK_LOOP int group() { return 0; }

  template <class V, class Combine>
  static ARK_LOOP V all(V x, Combine combine) {
    __shared__ V parts[kWarps];
    x = Warp::all(x, combine);
    sync();  // the use before has ended
    if (lane() == 0) parts[warp()] = x;
    sync();
    V result = parts[0];
    ARK_UNROLL for (int i = 1; i < kWarps; ++i) result = combine(result, parts[i]);
    return result;
  }
};

// Every element of 0 .. count, each by one thread.
template <class Body>
ARK_LOOP void for_elements(int64_t count, Body body) {
  for (int64_t i = thread(); i < count; i += kThreads) body(i);
}

// Rows 0 .. count, each by one Group.
template <class Group, class Body>
ARK_LOOP void for_rows(int64_t count, Body body) {
  for (int64_t i = Group::group(); i < count; i += Group::kGroups) body(i);
}

// Columns 0 .. count of a row, each by one thread of the Group.
template <class Group, class Body>
ARK_LOOP void for_columns(int64_t count, Body body) {
  for (int64_t i = Group::rank(); i < count; i += Group::kSize) body(i);
}

// The same for at most kTurns columns a thread, numbered: what a pass keeps of them for the next stays in registers.
template <class Group, int kTurns, class Body>
ARK_LOOP void for_columns(int64_t count, Body body) {
  ARK_UNROLL for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t i = Group::rank() + turn * Group::kSize;
    if (i < count) body(i, turn);
  }
}

#endif

}  // namespace ark::loop
