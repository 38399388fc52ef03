// A tile of a half-type product on tensor cores: a warp's part of it, one line's depth (64) at a time.
//
// Products are added along the depth in steps of 16, in order: an element's sum does not depend on the tile's shape.
#pragma once

#include "cuda/loop/tile_copy.cuh"

namespace ark::loop {

// kAAcross, kBAcross: whether lines run across the depth, see tile_copy.cuh.
template <class T, int kRows, int kColumns, bool kAAcross, bool kBAcross>
struct TensorTile {
  static constexpr int kWarpsDown = kRows == 16 ? 1 : kRows == 128 && kColumns == 32 ? 8 : 4;
  static constexpr int kWarpsAcross = kColumns / 8 < kWarps / kWarpsDown ? kColumns / 8 : kWarps / kWarpsDown;
  static constexpr int kMyRows = kRows / kWarpsDown, kMyColumns = kColumns / kWarpsAcross;
  static constexpr int kDown = kMyRows / 16, kOver = kMyColumns / 8;  // of products 16 x 8
  static constexpr int kRun = kMyColumns / 2;                         // of DualColumns
  static constexpr bool kAsync = false;                               // add() is done when it returns

  float sums[kDown][kOver][4];

  const int self = thread_anew();  // re-read: no register keeps anything of it across tiles
  ARK_LOOP int lane() const { return self % 32; }
  ARK_LOOP int first_row() const { return self / 32 / kWarpsAcross * kMyRows; }
  ARK_LOOP int first_column() const { return self / 32 % kWarpsAcross * kMyColumns; }

  ARK_LOOP void clear() {
    ARK_UNROLL for (int i = 0; i < kDown; ++i) ARK_UNROLL for (int j = 0; j < kOver; ++j)
        ARK_UNROLL for (int e = 0; e < 4; ++e) sums[i][j][e] = 0;
  }

  // The address of a lane's line of four 8 x 8 matrices: others o (two matrices) by depth d (two).
  template <bool kLinesAcross>
  ARK_LOOP const char* matrix_line(const char* tile, int o, int d, int o_matrix, int d_matrix) const {
    if constexpr (kLinesAcross) {
      const int at = o + o_matrix * 8;
      return tile_chunk(tile, at / 64 * 64 + d + d_matrix * 8 + lane() % 8, at % 64 / 8);
    } else {
      return tile_chunk(tile, o + o_matrix * 8 + lane() % 8, d / 8 + d_matrix);
    }
  }

  // A tile of few rows and columns leaves some warps without work.
  ARK_LOOP bool idle() const { return self / 32 >= kWarpsDown * kWarpsAcross; }

  // Arguments: the tiles' offsets in the workspace.
  ARK_LOOP void add(int a_at, int b_at) {
    if (idle()) return;
    const char *const a = workspace() + a_at, *const b = workspace() + b_at;
    const int m = lane() / 8;  // the matrix whose line this lane names
    _Pragma("unroll 2") for (int d = 0; d < 64; d += 16) {
      uint32 rows[kDown][4];
      ARK_UNROLL for (int i = 0; i < kDown; ++i)
          load_matrices<kAAcross>(rows[i], matrix_line<kAAcross>(a, first_row() + i * 16, d, m % 2, m / 2));
      ARK_UNROLL for (int j = 0; j < kOver; j += 2) {
        uint32 columns[4];  // two octets, each in two halves of the depth
        // An odd last octet is loaded twice.
        load_matrices<kBAcross>(columns,
                                matrix_line<kBAcross>(b, first_column() + j * 8, d, j + 1 < kOver ? m / 2 : 0, m % 2));
        ARK_UNROLL for (int i = 0; i < kDown; ++i) {
          multiply_add<T>(sums[i][j], rows[i], columns[0], columns[1]);
          if (j + 1 < kOver) multiply_add<T>(sums[i][j + 1], rows[i], columns[2], columns[3]);
        }
      }
    }
  }

  // The tile starts at row r and column c.
  template <class At, class Out, class Bias>
  ARK_LOOP void finish(const Product& s, const At& at, Out* out, const Bias* bias, int r, int r1, int c, int c1,
                       bool paired) const {
    if (idle()) return;
    ARK_UNROLL for (int i = 0; i < kDown; ++i) ARK_UNROLL for (int half = 0; half < 2; ++half) {
      const int row = r + first_row() + i * 16 + half * 8 + lane() / 4;
      if (row >= r1) continue;
      Out* const to = out + at.out(row);
      if constexpr (kDual<Bias>) {
        ARK_UNROLL for (int j = 0; j < kOver / 2; ++j) {
          const int column = c + first_column() / 2 + j * 8 + lane() % 4 * 2;
          finish_dual_pair(s, to, bias, row, column, c1, sums[i][j] + half * 2, sums[i][kOver / 2 + j] + half * 2,
                           paired);
        }
      } else {
        ARK_UNROLL for (int j = 0; j < kOver; ++j) {
          const int column = c + first_column() + j * 8 + lane() % 4 * 2;
          finish_pair(s, to, bias, row, column, c1, sums[i][j][half * 2], sums[i][j][half * 2 + 1], paired);
        }
      }
    }
  }
};

}  // namespace ark::loop
