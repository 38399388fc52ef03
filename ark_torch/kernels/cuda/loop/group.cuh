// The threads that work together, a warp or all of a block, and how they combine values.
//
// All kThreads threads of a block call a task's function, converged and with the same arguments. workspace() is shared
// memory for functions' own use; after using it, sync() must be called before the next use.
#pragma once

#include "cuda/loop/types.cuh"

namespace ark::loop {

inline constexpr int kWarps = 16;  // per block; 128 registers per thread
inline constexpr int kThreads = kWarps * 32;

// Bytes of shared memory available to a task. Plans that need little (csrc/compiler/schedule/workspace.hpp) get less,
// which leaves more first-level cache.
inline constexpr int kSmallWorkspaceBytes = 36 * 1024;
#if defined(ARK_LOOP_SMALL_WORKSPACE)
inline constexpr int kWorkspaceBytes = kSmallWorkspaceBytes;
#else
inline constexpr int kWorkspaceBytes = 96 * 1024;
#endif
inline constexpr int kWorkspaceAlignment = 1024;  // required by tile_group.cuh
// The same in kernels with warp groups: a large ring of tiles, for enough bytes in flight.
inline constexpr int kGroupWorkspaceBytes = 192 * 1024;

// Bytes of shared memory that keep what a task's first half computes for its second half
// (csrc/compiler/passes/prologue_fusion.hpp).
inline constexpr int kKeptBytes = 8 * 1024;

#if defined(__CUDACC__)

ARK_LOOP char* workspace() {
  extern __shared__ __align__(kWorkspaceAlignment) char dynamic_shared[];
  return dynamic_shared;
}

// A shared memory address in 32 bits, where a pointer would take two registers.
ARK_LOOP uint32 shared_address(const void* at) {
  return static_cast<uint32>(__cvta_generic_to_shared(at));
}
template <class T>
ARK_LOOP T* in_shared(uint32 at) {
  return static_cast<T*>(__cvta_shared_to_generic(at));
}

ARK_LOOP char* kept_bytes() {
  __shared__ __align__(16) char kept[kKeptBytes];
  return kept;
}

template <class T>
ARK_LOOP constexpr T least(T x, T y) {
  return x < y ? x : y;
}

// Barrier of all threads of the block.
ARK_LOOP void sync() {
  __syncthreads();
}
// The same; returns whether `holds` is true for any thread.
ARK_LOOP bool sync_any(bool holds) {
  return __syncthreads_or(holds) != 0;
}

ARK_LOOP int thread() {
  __builtin_assume(threadIdx.x < kThreads);  // avoids bounds checks for the last thread
  return static_cast<int>(threadIdx.x);
}
// The same, re-read, so that registers keep nothing derived from it until then.
ARK_LOOP int thread_anew() {
  int number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  __builtin_assume(number >= 0 && number < kThreads);
  return number;
}
ARK_LOOP int lane() {
  return thread() & 31;
}
ARK_LOOP int warp() {
  return thread() >> 5;
}

// A value that is equal in all lanes, in a way that the compiler knows, so that a branch on it does not diverge.
ARK_LOOP int uniform(int x) {
  return __reduce_min_sync(~0u, x);
}
ARK_LOOP float shuffle_xor(float x, int mask) {
  return __shfl_xor_sync(~0u, x, mask);
}
ARK_LOOP uint32 shuffle_xor(uint32 x, int mask) {
  return __shfl_xor_sync(~0u, x, mask);
}
// From thread `number` among kLanes.
template <int kLanes>
ARK_LOOP float shuffle_from(float x, int number) {
  return __shfl_sync(~0u, x, number, kLanes);
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

  // Combines all threads' values in a fixed order; all threads get the result.
  template <class V, class Combine>
  static ARK_LOOP V all(V x, Combine combine) {
    ARK_UNROLL for (int mask = 16; mask > 0; mask >>= 1) x = combine(x, shuffle_xor(x, mask));
    return x;
  }
};

// The same, with the first row on warp kFirst / 32.
template <int kFirst>
struct WarpFrom : Warp {
  static ARK_LOOP int group() { return (warp() + kWarps - kFirst) % kWarps; }
};

// The same for code that a task repeats between code that needs all registers (csrc/compiler/passes/kv_append.hpp): no
// register keeps anything derived from the thread's number until the next time.
template <int kFirst>
struct WarpAnew : Warp {
  static ARK_LOOP int rank() { return thread_anew() & 31; }
  static ARK_LOOP int group() { return ((thread_anew() >> 5) + kWarps - kFirst / 32) % kWarps; }
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
    sync();  // the previous use has ended
    if (lane() == 0) parts[warp()] = x;
    sync();
    V result = parts[0];
    ARK_UNROLL for (int i = 1; i < kWarps; ++i) result = combine(result, parts[i]);
    return result;
  }
};

// Columns over several warps; rows over such groups of a block.
template <int kCount>
struct Warps {
  static constexpr int kSize = kCount * 32, kGroups = kThreads / kSize;
  static ARK_LOOP int rank() { return thread() % kSize; }
  static ARK_LOOP int group() { return thread() / kSize; }

  template <class V, class Combine>
  static ARK_LOOP V all(V x, Combine combine) {
    __shared__ V parts[kWarps];
    x = Warp::all(x, combine);
    sync_warps();  // the previous use has ended
    if (lane() == 0) parts[warp()] = x;
    sync_warps();
    const V* const own = parts + group() * (kSize / 32);
    V result = own[0];
    ARK_UNROLL for (int i = 1; i < kSize / 32; ++i) result = combine(result, own[i]);
    return result;
  }

 private:
  static ARK_LOOP void sync_warps() {
    asm volatile("bar.sync %0, %1;" ::"r"(kFirstBarrier + group()), "n"(kSize) : "memory");
  }
  static constexpr int kFirstBarrier = 8;  // eight barriers that nothing else uses
  static_assert(kGroups <= 8);
};
using Warps2 = Warps<2>;
using Warps4 = Warps<4>;

// Elements 0 .. count, one thread each, starting with thread kFirst.
template <int kFirst = 0, class Body>
ARK_LOOP void for_elements(int64_t count, Body body) {
  ARK_ROLLED for (int64_t i = (thread() + kThreads - kFirst) % kThreads; i < count; i += kThreads) body(i);
}
// See WarpAnew.
template <int kFirst, class Body>
ARK_LOOP void for_elements_anew(int64_t count, Body body) {
  ARK_ROLLED for (int64_t i = (thread_anew() + kThreads - kFirst) % kThreads; i < count; i += kThreads) body(i);
}

// The same in blocks of kTurns elements per thread, so that their loads are in flight together.
template <int kTurns, class Body>
ARK_LOOP void for_blocks(int64_t count, Body body) {
#pragma unroll 1
  for (int64_t first = 0; first < count; first += kTurns * kThreads) body(first, count);
}
template <int kTurns, class Body>
ARK_LOOP void for_turns(int64_t first, int64_t past, Body body) {
  ARK_UNROLL for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t i = first + thread() + turn * kThreads;
    if (i < past) body(i, turn);
  }
}

// Rows 0 .. count, one Group each.
template <class Group, class Body>
ARK_LOOP void for_rows(int64_t count, Body body) {
  for (int64_t i = Group::group(); i < count; i += Group::kGroups) body(i);
}

// Columns 0 .. count of a row, each by one thread of the Group.
template <class Group, class Body>
ARK_LOOP void for_columns(int64_t count, Body body) {
  for (int64_t i = Group::rank(); i < count; i += Group::kSize) body(i);
}

// The same for at most kTurns columns per thread, numbered, so that a pass can keep them in registers for the next.
template <class Group, int kTurns, class Body>
ARK_LOOP void for_columns(int64_t count, Body body) {
  ARK_UNROLL for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t i = Group::rank() + turn * Group::kSize;
    if (i < count) body(i, turn);
  }
}

#endif

}  // namespace ark::loop
