// A tile of a product of halves on the tensor cores of sm_90a: groups of four warps multiply straight from shared
// memory (wgmma), while all threads copy what comes next.
//
// A matrix in shared memory is what tile_copy.cuh makes of it, which is a layout that the instructions know: lines of
// 128 bytes, chunks exchanged by the line's number, and every 1,024 bytes the pattern anew. Products are added up along
// the depth in steps of 16, in order: an element's sum does not depend on the tile's shape.
#pragma once

#include "cuda/loop/ptx_group.cuh"
#include "cuda/loop/tile_copy.cuh"

namespace ark::loop {

template <class T, int kRows, int kColumns, bool kAAcross, bool kBAcross>
struct GroupTile {
  static constexpr int kGroups = kWarps / 4;
  static constexpr int kGroupsDown = kRows / 64, kGroupsAcross = kGroups / kGroupsDown;
  static constexpr int kMyColumns = kColumns / kGroupsAcross, kOver = kMyColumns / 8;
  static_assert(kRows % 64 == 0 && kMyColumns % 8 == 0 && (!kBAcross || 64 % kMyColumns == 0));
  static constexpr bool kAsync = true;  // add() is done behind wait()

  float sums[kOver][4];
  uint32 rows_ = matrix<kAAcross>(first_row()), columns_ = matrix<kBAcross>(first_column());

  static ARK_LOOP int first_row() { return warp() / 4 / kGroupsAcross * 64; }
  static ARK_LOOP int first_column() { return warp() / 4 % kGroupsAcross * kMyColumns; }

  ARK_LOOP void clear() {
    ARK_UNROLL for (int j = 0; j < kOver; ++j) ARK_UNROLL for (int e = 0; e < 4; ++e) sums[j][e] = 0;
  }

  // Others o on, of a tile at the workspace's beginning. Lines across: of 64 others, 64 lines.
  template <bool kAcross>
  static ARK_LOOP uint32 matrix(int o) {
    const uint32 at = shared_address(workspace()) + (kAcross ? o / 64 * 64 * kLineBytes + o % 64 * 2 : o * kLineBytes);
    return pinned(shared_matrix(at, 64 * kLineBytes));
  }

  // The tiles' places in the workspace.
  ARK_LOOP void add(int a_at, int b_at) {
    // 16 of the depth on: as many lines, or 32 bytes of each line.
    constexpr int kAStep = kAAcross ? 16 * kLineBytes : 32, kBStep = kBAcross ? 16 * kLineBytes : 32;
    begin_group_multiply();
    ARK_UNROLL for (int step = 0; step < 4; ++step) group_multiply_add<T, kAAcross, kBAcross>(
        sums, moved_matrix(rows_, a_at + step * kAStep), moved_matrix(columns_, b_at + step * kBStep));
    end_group_multiply();
  }

  ARK_LOOP void wait() { wait_group_multiply(sums); }

  // As TensorTile's.
  template <class At, class Out, class Bias>
  ARK_LOOP void finish(const Product& s, const At& at, Out* out, const Bias* bias, int r, int r1, int c, int c1,
                       bool paired) const {
    ARK_UNROLL for (int half = 0; half < 2; ++half) {
      const int row = r + first_row() + warp() % 4 * 16 + half * 8 + lane() / 4;
      if (row >= r1) continue;
      Out* const to = out + at.out(row);
      ARK_UNROLL for (int j = 0; j < kOver; ++j) {
        const int column = c + first_column() + j * 8 + lane() % 4 * 2;
        finish_pair(s, to, bias, row, column, c1, sums[j][half * 2], sums[j][half * 2 + 1], paired);
      }
    }
  }
};

}  // namespace ark::loop
