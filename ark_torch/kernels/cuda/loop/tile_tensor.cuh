// A tile of a half-type product, or of a float32 one in TF32 (T: tf32), on tensor cores: a warp's part of it, one
// line's depth (64, or 32) at a time.
//
// Products are added along the depth in steps of 16 (8), in order: an element's sum does not depend on the tile's
// shape.
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
  static constexpr bool kWords = kSame<T, tf32>;
  static constexpr int kPer = kPerChunk<T>;

  float sums[kDown][kOver][4];

  const int self = thread_anew();  // re-read: no register keeps anything of it across tiles
  ARK_LOOP int lane() const { return self % 32; }
  ARK_LOOP int first_row() const { return self / 32 / kWarpsAcross * kMyRows; }
  ARK_LOOP int first_column() const { return self / 32 % kWarpsAcross * kMyColumns; }

  ARK_LOOP void clear() {
    ARK_UNROLL for (int i = 0; i < kDown; ++i) ARK_UNROLL for (int j = 0; j < kOver; ++j)
        ARK_UNROLL for (int e = 0; e < 4; ++e) sums[i][j][e] = 0;
  }

  // The address of a lane's line of four matrices of 8 others by a chunk's depth: others o (two matrices) by depth d
  // (two). Across lines these are 8 x 8 of half types.
  template <bool kLinesAcross>
  ARK_LOOP const char* matrix_line(const char* tile, int o, int d, int o_matrix, int d_matrix) const {
    if constexpr (kLinesAcross) {
      const int at = o + o_matrix * 8;
      return tile_chunk(tile, at / 64 * 64 + d + d_matrix * 8 + lane() % 8, at % 64 / 8);
    } else {
      return tile_chunk(tile, o + o_matrix * 8 + lane() % 8, d / kPer + d_matrix);
    }
  }
  // The lane's element of such a matrix at others o and depth d, as load_matrices would load it, across lines.
  ARK_LOOP uint32 word_across(const char* tile, int o, int d) const {
    const int at = o + lane() / 4;
    const char* const chunk = tile_chunk<true>(tile, at / 32 * 32 + d + lane() % 4, at % 32 / 4);
    return *reinterpret_cast<const uint32*>(chunk + at % 4 * 4);
  }

  // Rows r to r + 16 of a, two chunks' depth from d on, as multiply_add takes them. m: of the matrix whose line this
  // lane names.
  ARK_LOOP void load_rows(uint32 (&rows)[4], const char* a, int r, int d, int m) const {
    if constexpr (kWords && kAAcross)
      ARK_UNROLL for (int i = 0; i < 4; ++i) rows[i] = word_across(a, r + i % 2 * 8, d + i / 2 * kPer);
    else
      load_matrices<kAAcross>(rows, matrix_line<kAAcross>(a, r, d, m % 2, m / 2));
    round(rows);
  }
  // Two octets of columns from c on, each in two chunks' depth. Unless there are two, the one is loaded twice.
  ARK_LOOP void load_columns(uint32 (&columns)[4], const char* b, int c, int d, int m, bool two) const {
    if constexpr (kWords && kBAcross)
      ARK_UNROLL for (int i = 0; i < 4; ++i) columns[i] = word_across(b, c + (two ? i / 2 * 8 : 0), d + i % 2 * kPer);
    else
      load_matrices<kBAcross>(columns, matrix_line<kBAcross>(b, c, d, two ? m / 2 : 0, m % 2));
    round(columns);
  }
  static ARK_LOOP void round(uint32 (&words)[4]) {
    if constexpr (kWords) ARK_UNROLL for (int i = 0; i < 4; ++i) words[i] = rounded_to_tf32(words[i]);
  }

  // A tile of few rows and columns leaves some warps without work.
  ARK_LOOP bool idle() const { return self / 32 >= kWarpsDown * kWarpsAcross; }

  // Arguments: the tiles' offsets in the workspace.
  ARK_LOOP void add(int a_at, int b_at) {
    if (idle()) return;
    const char *const a = workspace() + a_at, *const b = workspace() + b_at;
    const int m = lane() / 8;
    _Pragma("unroll 2") for (int d = 0; d < 8 * kPer; d += 2 * kPer) {
      uint32 rows[kDown][4];
      ARK_UNROLL for (int i = 0; i < kDown; ++i) load_rows(rows[i], a, first_row() + i * 16, d, m);
      ARK_UNROLL for (int j = 0; j < kOver; j += 2) {
        uint32 columns[4];
        load_columns(columns, b, first_column() + j * 8, d, m, j + 1 < kOver);
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
