// A row's columns in runs: each thread of a Group has kRun contiguous columns, which it loads and stores in one
// instruction if aligned, so that all of a row's loads are in flight after a few instructions.
#pragma once

#include "cuda/loop/group.cuh"
#include "cuda/loop/hinted.cuh"

namespace ark::loop {

#if defined(__CUDACC__)

// At most 16 bytes of a run.
template <class T, int kRun>
struct Piece {
  static constexpr int kEach = kRun * sizeof(T) <= 16 ? kRun : 16 / static_cast<int>(sizeof(T));
  static_assert(kRun % kEach == 0);
  struct alignas(kEach * sizeof(T)) Elements {
    Plain<T> at[kEach];
  };
};
// Whether the runs of a row can be loaded and stored in pieces.
template <int kRun, class T>
ARK_LOOP bool run_fits(const T* row) {
  return (bits_as<uint64>(row) & (sizeof(typename Piece<T, kRun>::Elements) - 1)) == 0;
}

// Starts a rarely taken branch. Without it the compiler would predicate its instructions, and all threads would step
// through them. Called by any threads.
ARK_LOOP void seldom() {
  __syncwarp(__activemask());
}

// Columns 0 .. count, a multiple of kRun, each by one thread.
template <class Group, int kRun, class Body>
ARK_LOOP void for_runs(int64_t count, Body body) {
  const int64_t first = Group::rank() * kRun;
  if (first < count) ARK_UNROLL for (int turn = 0; turn < kRun; ++turn) body(first + turn, turn);
}

// The thread's columns of a row whose runs fit.
template <class Group, int kRun, class T, class V>
ARK_LOOP void load_run(V (&to)[kRun], const T* row, int64_t count) {
  using P = Piece<T, kRun>;
  const int64_t first = Group::rank() * kRun;
  if (first >= count) return;
  ARK_UNROLL for (int i = 0; i < kRun; i += P::kEach) {
    const auto piece = load_bytes<typename P::Elements>(row + first + i);
    ARK_UNROLL for (int j = 0; j < P::kEach; ++j) to[i + j] = widen(piece.at[j]);
  }
}
// The same for kParts rows, `apart` elements apart, added in order; `round` is applied to each sum.
template <class Group, int kRun, int kParts, class T, class Round>
ARK_LOOP void load_run_of_parts(float (&to)[kRun], const T* row, int64_t apart, int64_t count, Round round) {
  if (Group::rank() * kRun >= count) return;  // avoids keeping unloaded registers across rows
  float parts[kParts][kRun];
  ARK_UNROLL for (int i = 0; i < kParts; ++i) load_run<Group>(parts[i], row + i * apart, count);
  ARK_UNROLL for (int j = 0; j < kRun; ++j) {
    float sum = parts[0][j];
    ARK_UNROLL for (int i = 1; i < kParts; ++i) sum += parts[i][j];
    to[j] = round(sum);
  }
}
// A run of any row, aligned or not.
template <int kRun, class T, class V>
ARK_LOOP void store_pieces(T* to, const V (&from)[kRun]) {
  using P = Piece<T, kRun>;
  if (run_fits<kRun>(to)) {
    ARK_UNROLL for (int i = 0; i < kRun; i += P::kEach) {
      typename P::Elements piece;
      ARK_UNROLL for (int j = 0; j < P::kEach; ++j) piece.at[j] = narrow(from[i + j], Plain<T>{});
      store_bytes(to + i, piece);
    }
  } else {
    seldom();
    ARK_UNROLL for (int i = 0; i < kRun; ++i) store_one(to + i, from[i]);
  }
}
template <class Group, int kRun, class T, class V>
ARK_LOOP void store_run(T* row, const V (&from)[kRun], int64_t count) {
  const int64_t first = Group::rank() * kRun;
  if (first < count) store_pieces(row + first, from);
}

#endif

}  // namespace ark::loop
