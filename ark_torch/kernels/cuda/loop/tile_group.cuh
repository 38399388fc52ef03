// A tile of a half-type product, or of a float32 one in TF32, on the tensor cores of sm_90a: warp groups multiply
// straight from shared memory (wgmma) while all threads copy what comes next.
//
// tile_copy.cuh writes matrices in a layout that these instructions support: lines of 128 bytes with swizzled chunks, a
// pattern that repeats every 1,024 bytes. A group has 64 rows and up to 128 columns of the tile: with fewer columns it
// would read as much of a for less work, and reads are the bottleneck. If there are more groups than such parts, groups
// split the depth: the g-th adds up the g-th part of each line, in steps of 32 bytes, and finally their sums are added
// in order. So an element's sum depends on the tile's shape and the depth, not on the tile's position.
//
// In TF32 these instructions ignore the lower 13 bits of what lies in shared memory: float32 is rounded toward zero, as
// by Triton and CUTLASS.
#pragma once

#include "cuda/loop/ptx_group.cuh"
#include "cuda/loop/tensor.cuh"
#include "cuda/loop/tile_copy.cuh"

namespace ark::loop {

// kPromotes: of float8, whose products are added with fewer bits than float32 has. Each line is then added on its own,
// and its sums as float32, for which a group has registers with 64 columns.
template <class T, int kRows, int kColumns, bool kAAcross, bool kBAcross, bool kPromotes = false>
struct GroupTile {
  static constexpr int kMostColumns = kPromotes ? 64 : 128;
  static constexpr int kMyColumns = kColumns > kMostColumns ? kMostColumns : kColumns;
  static constexpr int kDown = kRows / 64, kAcross = kColumns / kMyColumns, kSplit = kWarps / 4 / (kDown * kAcross);
  static constexpr int kOver = kMyColumns / 8, kMine = kOver / kSplit;  // of products 64 x 8; that a group finishes
  static constexpr int kRun = kMine * 4;                                // of DualColumns
  static_assert(kSplit > 0 && kRows % 64 == 0 && kColumns % kMyColumns == 0 && kOver % kSplit == 0);
  static_assert(kMine <= 8 || kSplit == 1);
  static_assert(!kBAcross || 64 % kMyColumns == 0 || kMyColumns % 64 == 0);
  static_assert(kWorkspaceAlignment % 1024 == 0);  // chunks are swizzled by bits of their address
  static constexpr bool kAsync = true;             // add() is done after wait(), and finish() needs the workspace

  float sums[kOver][4];
  float line[kPromotes ? kOver : 1][4];  // sums of the last line
  uint32 rows_ = matrix<kAAcross>(first_row()), columns_ = matrix<kBAcross>(first_column());

  static ARK_LOOP int part(int self = thread()) { return self / 128 % kSplit; }
  static ARK_LOOP int place(int self = thread()) { return self / 128 / kSplit; }  // of the group's part of the tile
  static ARK_LOOP int first_row(int self = thread()) { return place(self) / kAcross * 64; }
  static ARK_LOOP int first_column(int self = thread()) { return place(self) % kAcross * kMyColumns; }

  ARK_LOOP void clear() {
    ARK_UNROLL for (int j = 0; j < kOver; ++j) ARK_UNROLL for (int e = 0; e < 4; ++e) {
      sums[j][e] = 0;
      if constexpr (kPromotes) line[j][e] = 0;
    }
  }

  // The stride of steps along the depth: 16 lines, or 32 bytes of each line (16 depths of half types, 32 of float8, 8
  // of tf32).
  template <bool kLinesAcross>
  static constexpr int kStep = kLinesAcross ? 16 * kLineBytes : 32;

  // The descriptor of this group's part of the depth for others from o on, in a tile at the workspace's start. If lines
  // run across, 64 others take 64 lines.
  template <bool kLinesAcross>
  static ARK_LOOP uint32 matrix(int o) {
    const int others = kLinesAcross ? o / 64 * 64 * kLineBytes + o % 64 * 2 : o * kLineBytes;
    return pinned(shared_matrix(shared_address(workspace()) + others + part() * (4 / kSplit) * kStep<kLinesAcross>,
                                64 * kLineBytes));
  }

  // Arguments: the tiles' offsets in the workspace.
  ARK_LOOP void add(int a_at, int b_at) {
    begin_group_multiply();
    if constexpr (kPromotes) {
      group_multiply_add<T, false, false, false>(line, moved_matrix(rows_, a_at), moved_matrix(columns_, b_at));
      ARK_UNROLL for (int step = 1; step < 4 / kSplit; ++step) group_multiply_add<T, false, false>(
          line, moved_matrix(rows_, a_at + step * 32), moved_matrix(columns_, b_at + step * 32));
    } else {
      ARK_UNROLL for (int step = 0; step < 4 / kSplit; ++step)
          group_multiply_add<T, kAAcross, kBAcross>(sums, moved_matrix(rows_, a_at + step * kStep<kAAcross>),
                                                    moved_matrix(columns_, b_at + step * kStep<kBAcross>));
    }
    end_group_multiply();
  }

  // Waits until all but the last kLeft calls of add() are done; with kPromotes, all. Then no two calls stand side by
  // side without add() in between, but at first.
  template <int kLeft>
  ARK_LOOP void wait() {
    if constexpr (kPromotes) {
      wait_group_multiply(line);
      ARK_UNROLL for (int j = 0; j < kOver; ++j) ARK_UNROLL for (int e = 0; e < 4; ++e) sums[j][e] += line[j][e];
    } else if constexpr (kLeft == 0)
      wait_group_multiply(sums);
    else
      wait_group_multiply<kLeft>();
  }

  // The place where a thread of part `from` leaves its j-th sums for the same thread of the part that finishes them.
  static ARK_LOOP Chunk* left_sums(int self, int from, int j) {
    const int to = j / kMine;
    const int slot = (from * (kSplit - 1) + to - (to > from)) * kMine + j % kMine;
    return reinterpret_cast<Chunk*>(workspace()) + (slot * kDown * kAcross + place(self)) * 128 + self % 128;
  }

  // Leaves the sums that other parts finish.
  ARK_LOOP void leave(int self) {
    if constexpr (kSplit > 1) {
      sync();  // no one reads the ring any more
      ARK_UNROLL for (int j = 0; j < kOver; ++j) if (j / kMine != part(self)) * left_sums(self, part(self), j) = {
          bits_of(sums[j][0]), bits_of(sums[j][1]), bits_of(sums[j][2]), bits_of(sums[j][3])};
    }
  }
  // Collects the sums that this part finishes, of all parts in order.
  ARK_LOOP void collect(int self, float (&mine)[kMine][4]) {
    if constexpr (kSplit > 1) sync();
    if constexpr (kSplit == 2) {  // the order of two does not matter
      const bool second = part(self) != 0;
      const Chunk* const others = left_sums(self, 1 - part(self), part(self) * kMine);
      ARK_UNROLL for (int i = 0; i < kMine; ++i) {
        const Chunk other = others[i * kDown * kAcross * 128];
        ARK_UNROLL for (int e = 0; e < 4; ++e) mine[i][e] =
            (second ? sums[kMine + i][e] : sums[i][e]) + chunk_element<float>(other, e);
      }
    } else {
      ARK_UNROLL for (int i = 0; i < kMine; ++i) collect_one(self, i, mine[i]);
    }
  }
  ARK_LOOP void collect_one(int self, int i, float (&mine)[4]) {
    ARK_UNROLL for (int e = 0; e < 4; ++e) mine[e] = 0;
    ARK_UNROLL for (int from = 0; from < kSplit; ++from) {
      Chunk other{};
      if (from != part(self)) other = *left_sums(self, from, part(self) * kMine + i);
      ARK_UNROLL for (int e = 0; e < 4; ++e) {
        float own = sums[i][e];
        ARK_UNROLL for (int to = 1; to < kSplit; ++to) own = part(self) == to ? sums[to * kMine + i][e] : own;
        const float sum = from == part(self) ? own : chunk_element<float>(other, e);
        mine[e] = from == 0 ? sum : mine[e] + sum;
      }
    }
  }

  // As in TensorTile. A bias is loaded while the last multiplications run and before anything is stored, since loads do
  // not pass stores. Nothing here is computed before the ring is empty: there are no registers for it.
  template <class At, class Out, class Bias>
  ARK_LOOP void finish(const Product& s, const At& at, Out* out, const Bias* bias, int r, int r1, int c, int c1,
                       bool paired) {
    const int self = thread_anew(), lane = self % 32;
    const int row = r + first_row(self) + self / 32 % 4 * 16 + lane / 4;
    constexpr bool kTwo = kDual<Bias>;
    static_assert(!kTwo || kMine % 2 == 0);
    constexpr int kDone = kTwo ? kMine / 2 : kMine;    // octets of the result's columns
    constexpr int kHeld = kTwo ? 2 : (kMine + 7) / 8;  // a lane keeps the biases of two columns of each 64
    const int my_columns = c + (first_column(self) + part(self) * kMine * 8) / (kTwo ? 2 : 1);
    const int column = my_columns + lane % 4 * 2;
    static_assert(!kScaled<Bias> || kHeld == 1);
    float held[kHeld][2] = {}, mine[kMine][4];  // if all rows share the bias
    const RowAndColumnScales<kScaled<Bias>> scales(bias, row, r1, my_columns + lane * 2, c1, lane * 2 < kMine * 8);
    ARK_UNROLL for (int h = 0; h < kHeld; ++h) ARK_UNROLL for (int e = 0; e < 2; ++e) {
      const int mine_at = (kTwo ? 0 : h * 64) + lane * 2;
      if (kHasBias<Bias> && s.bias_row == 0 && mine_at < kDone * 8 && my_columns + mine_at + e < c1)
        held[h][e] = bias_of(s, nth_bias(bias, h), 0, my_columns + mine_at + e);
    }
    wait<0>();
    leave(self);
    collect(self, mine);
    const auto add_bias = [&](int i) {
      const int octet = i % kDone, h = kTwo ? i / kDone : i / 8;
      const auto* const my_bias = nth_bias(bias, h);
      float added[4] = {};
      ARK_UNROLL for (int e = 0; e < 4; ++e) if constexpr (kHasBias<Bias>) {
        const int my_row = row + e / 2 * 8, my_column = column + octet * 8 + e % 2;
        if (s.bias_row == 0)
          added[e] = e < 2 ? shuffle_from<32>(held[h][e], octet % 8 * 4 + lane % 4) : added[e - 2];
        else if (my_row < r1 && my_column < c1)
          added[e] = bias_of(s, my_bias, my_row, my_column);
      }
      ARK_UNROLL for (int e = 0; e < 4; ++e) mine[i][e] =
          finished(my_bias, scales.applied(mine[i][e], e / 2, e % 2, octet % 8 * 4 + lane % 4), added[e]);
    };
    if constexpr (kTwo) {
      ARK_UNROLL for (int i = 0; i < kDone; ++i) {
        add_bias(i);
        add_bias(kDone + i);
        // Each octet has a branch of its own, which keeps the compiler from computing many at once: registers are few.
        if (pinned(row < r1) != 0) {
          ARK_UNROLL for (int e = 0; e < 4; ++e) mine[i][e] = bias->finish(mine[i][e], mine[kDone + i][e]);
        }
      }
    } else if (kHasBias<Bias> && !kScaled<Bias> && s.bias_row != 0) {
      // As above: biases must not be loaded for many octets at once.
      ARK_UNROLL for (int i = 0; i < kMine; ++i) if (pinned(row < r1) != 0) add_bias(i);
    } else {
      ARK_UNROLL for (int i = 0; i < kMine; ++i) add_bias(i);
    }
    const bool adjacent = kDone % 2 == 0 && paired && c1 - c >= kColumns / (kTwo ? 2 : 1) && c % 4 == 0 &&
                          s.out_row % 4 == 0 && is_aligned(out, 4 * static_cast<int>(sizeof(Out)));
    ARK_UNROLL for (int half = 0; half < 2; ++half) {
      const bool there = row + half * 8 < r1;
      Out* const to = out + at.out(there ? row + half * 8 : r);
      if (adjacent) {
        store_exchanged<kDone>(to + column, mine, half, lane % 2 != 0, there);
      } else if (there) {
        ARK_UNROLL for (int i = 0; i < kDone; ++i)
            store_pair(s, to, column + i * 8, c1, mine[i][half * 2], mine[i][half * 2 + 1], paired);
      }
    }
  }

  // Of eight columns a lane has two, adjacent to the next lane's. Over two octets, pairs of lanes exchange columns so
  // that each stores four adjacent ones: fewer and longer stores.
  template <int kDone, class Out>
  static ARK_LOOP void store_exchanged(Out* to, const float (&mine)[kMine][4], int half, bool odd, bool there) {
    ARK_UNROLL for (int i = 0; i + 1 < kDone; i += 2) {
      const float *const first = mine[i] + half * 2, *const second = mine[i + 1] + half * 2;
      Together<Out, 4> four;
      if constexpr (kIsHalf<Out>) {
        const uint32 low = pack_two(first[0], first[1], Out{}), high = pack_two(second[0], second[1], Out{});
        const uint32 other = shuffle_xor(odd ? low : high, 1);
        four = bits_as<Together<Out, 4>>(odd ? Together<uint32, 2>{other, high} : Together<uint32, 2>{low, other});
      } else {
        const float x = shuffle_xor(odd ? first[0] : second[0], 1), y = shuffle_xor(odd ? first[1] : second[1], 1);
        four = odd ? Together<Out, 4>{x, y, second[0], second[1]} : Together<Out, 4>{first[0], first[1], x, y};
      }
      if (there) *reinterpret_cast<Together<Out, 4>*>(to + i * 8 + (odd ? 6 : 0)) = four;
    }
  }
};

}  // namespace ark::loop
