// A tile of a product of halves on the tensor cores of sm_90a: groups of four warps multiply straight from shared
// memory (wgmma), while all threads copy what comes next.
//
// A matrix in shared memory is what tile_copy.cuh makes of it, which is a layout that the instructions know: lines of
// 128 bytes, chunks exchanged by the line's number, and every 1,024 bytes the pattern anew. A group has 64 rows and all
// columns of the tile: with fewer, it would read as much of a for less, and reading is what takes the time. Groups
// share the depth: of each line, the g-th adds up the g-th part, in steps of 16, and in the end their sums are added up
// in order. So an element's sum depends on the tile's shape and the depth, not on where a tile begins.
#pragma once

#include "cuda/loop/ptx_group.cuh"
#include "cuda/loop/tile_copy.cuh"

namespace ark::loop {

template <class T, int kRows, int kColumns, bool kAAcross, bool kBAcross>
struct GroupTile {
  static constexpr int kMyColumns = kBAcross && kColumns > 64 ? 64 : kColumns;
  static constexpr int kDown = kRows / 64, kAcross = kColumns / kMyColumns, kSplit = kWarps / 4 / (kDown * kAcross);
  static constexpr int kOver = kMyColumns / 8, kMine = kOver / kSplit;  // of products 64 x 8; that a group finishes
  static_assert(kRows % 64 == 0 && kColumns % kMyColumns == 0 && kOver % kSplit == 0);
  static_assert(!kBAcross || 64 % kMyColumns == 0);
  static_assert(kWorkspaceAlignment % 1024 == 0);  // chunks are exchanged by bits of their address
  static constexpr bool kAsync = true;             // add() is done behind wait(), and finish() needs the workspace

  float sums[kOver][4];
  uint32 rows_ = matrix<kAAcross>(first_row()), columns_ = matrix<kBAcross>(first_column());

  static ARK_LOOP int part() { return warp() / 4 % kSplit; }
  static ARK_LOOP int place() { return warp() / 4 / kSplit; }  // of the group's part of the tile
  static ARK_LOOP int first_row() { return place() / kAcross * 64; }
  static ARK_LOOP int first_column() { return place() % kAcross * kMyColumns; }

  ARK_LOOP void clear() {
    ARK_UNROLL for (int j = 0; j < kOver; ++j) ARK_UNROLL for (int e = 0; e < 4; ++e) sums[j][e] = 0;
  }

  // How far apart steps of 16 of the depth are: as many lines, or 32 bytes of each line.
  template <bool kLinesAcross>
  static constexpr int kStep = kLinesAcross ? 16 * kLineBytes : 32;

  // This group's part of the depth of others o on, of a tile at the workspace's beginning. Lines across: of 64 others,
  // 64 lines.
  template <bool kLinesAcross>
  static ARK_LOOP uint32 matrix(int o) {
    const int others = kLinesAcross ? o / 64 * 64 * kLineBytes + o % 64 * 2 : o * kLineBytes;
    return pinned(shared_matrix(shared_address(workspace()) + others + part() * (4 / kSplit) * kStep<kLinesAcross>,
                                64 * kLineBytes));
  }

  // The tiles' places in the workspace.
  ARK_LOOP void add(int a_at, int b_at) {
    begin_group_multiply();
    ARK_UNROLL for (int step = 0; step < 4 / kSplit; ++step)
        group_multiply_add<T, kAAcross, kBAcross>(sums, moved_matrix(rows_, a_at + step * kStep<kAAcross>),
                                                  moved_matrix(columns_, b_at + step * kStep<kBAcross>));
    end_group_multiply();
  }

  // All but the last kLeft calls of add() are done.
  template <int kLeft>
  ARK_LOOP void wait() {
    if constexpr (kLeft == 0)
      wait_group_multiply(sums);
    else
      wait_group_multiply<kLeft>();
  }

  // Where a thread leaves the j-th sums of part `from` for the part that finishes them: for the same thread of it.
  static ARK_LOOP Chunk* left_sums(int from, int j) {
    const int to = j / kMine;
    const int slot = (from * (kSplit - 1) + to - (to > from)) * kMine + j % kMine;
    return reinterpret_cast<Chunk*>(workspace()) + (slot * kDown * kAcross + place()) * 128 + thread() % 128;
  }

  // The sums that this part finishes: of all parts, in order.
  ARK_LOOP void collect(float (&mine)[kMine][4]) {
    if constexpr (kSplit > 1) {
      sync();  // nobody reads the ring any more
      ARK_UNROLL for (int j = 0; j < kOver; ++j) if (j / kMine != part()) *
          left_sums(part(), j) = {bits_of(sums[j][0]), bits_of(sums[j][1]), bits_of(sums[j][2]), bits_of(sums[j][3])};
      sync();
    }
    ARK_UNROLL for (int i = 0; i < kMine; ++i) {
      ARK_UNROLL for (int e = 0; e < 4; ++e) mine[i][e] = 0;
      ARK_UNROLL for (int from = 0; from < kSplit; ++from) {
        Chunk other{};
        if (from != part()) other = *left_sums(from, part() * kMine + i);
        ARK_UNROLL for (int e = 0; e < 4; ++e) {
          float own = sums[i][e];
          ARK_UNROLL for (int to = 1; to < kSplit; ++to) own = part() == to ? sums[to * kMine + i][e] : own;
          const float sum = from == part() ? own : chunk_element<float>(other, e);
          mine[i][e] = from == 0 ? sum : mine[i][e] + sum;
        }
      }
    }
  }

  // As TensorTile's.
  template <class At, class Out, class Bias>
  ARK_LOOP void finish(const Product& s, const At& at, Out* out, const Bias* bias, int r, int r1, int c, int c1,
                       bool paired) {
    float mine[kMine][4];
    collect(mine);
    ARK_UNROLL for (int half = 0; half < 2; ++half) {
      const int row = r + first_row() + warp() % 4 * 16 + half * 8 + lane() / 4;
      if (row >= r1) continue;
      Out* const to = out + at.out(row);
      ARK_UNROLL for (int i = 0; i < kMine; ++i) {
        const int column = c + first_column() + (part() * kMine + i) * 8 + lane() % 4 * 2;
        finish_pair(s, to, bias, row, column, c1, mine[i][half * 2], mine[i][half * 2 + 1], paired);
      }
    }
  }
};

}  // namespace ark::loop
