// A tile of a float32 product by fused multiply-adds: a thread's part of it, one line's depth (32) at a time.
//
// Products within a line's depth are added one by one, in order, and so are the lines' sums: an element's sum does not
// depend on the tile's shape, and its error grows with the number of lines.
#pragma once

#include "cuda/loop/tile_copy.cuh"

namespace ark::loop {

template <int kRows, int kColumns>
struct PlainTile {
  // Threads down and across; a warp is 4 x 8 of them. These are also the strides of a thread's rows and columns.
  static constexpr int kThreadsDown = kRows == 16 ? 8 : kColumns == 32 ? 32 : 16;
  static constexpr int kThreadsAcross = kThreads / kThreadsDown;
  static constexpr int kDown = kRows / kThreadsDown, kOver = kColumns / kThreadsAcross;
  static constexpr int kRun = kThreadsAcross;  // of DualColumns
  static constexpr bool kAsync = false;        // add() is done when it returns

  float sums[kDown][kOver];

  const int self = thread_anew();  // re-read: no register keeps anything of it across tiles
  ARK_LOOP int first_row() const { return self / 32 / (kThreadsAcross / 8) * 4 + self % 32 / 8; }
  ARK_LOOP int first_column() const { return self / 32 % (kThreadsAcross / 8) * 8 + self % 8; }

  ARK_LOOP void clear() {
    ARK_UNROLL for (int i = 0; i < kDown; ++i) ARK_UNROLL for (int j = 0; j < kOver; ++j) sums[i][j] = 0;
  }

  // Arguments: the tiles' offsets in the workspace.
  ARK_LOOP void add(int a_at, int b_at) {
    const char *const a = workspace() + a_at, *const b = workspace() + b_at;
    auto load = [](const char* tile, int line, int chunk) {
      return *reinterpret_cast<const Chunk*>(tile_chunk(tile, line, chunk));
    };
    float line[kDown][kOver] = {};
    _Pragma("unroll 1") for (int chunk = 0; chunk < 8; ++chunk) {
      Chunk columns[kOver];  // no more of them than rows
      ARK_UNROLL for (int j = 0; j < kOver; ++j) columns[j] = load(b, first_column() + j * kThreadsAcross, chunk);
      ARK_UNROLL for (int i = 0; i < kDown; ++i) {
        const Chunk row = load(a, first_row() + i * kThreadsDown, chunk);
        ARK_UNROLL for (int j = 0; j < kOver; ++j) ARK_UNROLL for (int e = 0; e < 4; ++e) line[i][j] =
            fused(chunk_element<float>(row, e), chunk_element<float>(columns[j], e), line[i][j]);
      }
    }
    ARK_UNROLL for (int i = 0; i < kDown; ++i) ARK_UNROLL for (int j = 0; j < kOver; ++j) sums[i][j] += line[i][j];
  }

  template <class At, class Out, class Bias>
  ARK_LOOP void finish(const Product& s, const At& at, Out* out, const Bias* bias, int r, int r1, int c, int c1,
                       bool) const {
    ARK_UNROLL for (int i = 0; i < kDown; ++i) {
      const int row = r + first_row() + i * kThreadsDown;
      if (row >= r1) continue;
      if constexpr (kDual<Bias>) {
        ARK_UNROLL for (int j = 0; j + 1 < kOver; j += 2) {
          const int column = c + first_column() + j / 2 * kThreadsAcross;
          if (column < c1)
            store_one(out + at.out(row) + column * s.out_column,
                      finished_dual(s, bias, row, column, sums[i][j], sums[i][j + 1]));
        }
      } else {
        ARK_UNROLL for (int j = 0; j < kOver; ++j) {
          const int column = c + first_column() + j * kThreadsAcross;
          if (column < c1) finish_one(s, out + at.out(row), bias, row, column, sums[i][j]);
        }
      }
    }
  }
};

}  // namespace ark::loop
