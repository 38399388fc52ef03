// The tiles of experts' products (moe_product.cuh), and which block computes which, from the experts' numbers of rows.
//
// Blocks take the tiles in waves of one a block. What is left for the last wave often occupies few blocks, and would
// take as long as a whole wave. Its tiles are therefore divided, by columns and then by rows, as long as there are idle
// blocks. A part still adds along the whole depth: an element has the same bits in any tile or part.
#pragma once

#include "cuda/fused/matmul_shape.cuh"

namespace ark::device {

struct MoeTile {
  uint32 expert, row, rows, column;  // number of existing rows, from `row` on
  uint32 across;                     // into how many parts the columns of its tile are divided
};

// Parts have 32 columns at least, for which each row of a is loaded again, and 64 rows, those of a warp group.
ARK_HOST_DEVICE constexpr uint32 moe_most_across(const MatmulShape& shape) {
  return static_cast<uint32>(shape.columns / 32 < 4 ? shape.columns / 32 : 4);
}
ARK_HOST_DEVICE constexpr uint32 moe_most_down(const MatmulShape& shape) {
  return static_cast<uint32>(shape.groups());
}

struct MoeWaves {
  uint32 whole, left;   // waves of whole tiles; tiles of the last, incomplete one
  uint32 across, down;  // into how many parts the columns and the rows of these are divided

  ARK_HOST_DEVICE constexpr MoeWaves(uint32 tiles, uint32 blocks, const MatmulShape& shape)
      : whole(tiles / blocks), left(tiles % blocks), across(1), down(1) {
    while (across < moe_most_across(shape) && left * across * 2 <= blocks) across *= 2;
    if (across == moe_most_across(shape) && left * across * moe_most_down(shape) <= blocks) down = moe_most_down(shape);
  }
};

// Finds a block's tiles, in their order. `Counts` has the experts' numbers of rows: sum(f) adds f(count) over all
// experts, and at(e) is called for expert after expert. On the device a whole warp calls everything.
template <int kRows, int kColumns, int kOut, class Counts>
class MoeTiles {
 public:
  ARK_DEVICE_INLINE MoeTiles(Counts counts, uint32 columns, uint32 block, uint32 blocks)
      : counts_(counts),
        columns_(columns),
        column_tiles_((columns + kOut - 1) / kOut),
        block_(block),
        blocks_(blocks),
        waves_(counts_.sum([](uint32 count) { return heights(count); }) * column_tiles_, blocks, {kRows, kColumns}) {}

  // The n-th tile, or part of one; false: there is none any more.
  ARK_DEVICE_INLINE bool find(uint32 n, MoeTile& tile) {
    // Blocks take another place in each wave, so that all get as many small tiles, whatever number of tiles an expert's
    // columns have.
    constexpr uint32 kTurn = 5;
    const uint32 place = (block_ + n * kTurn) % blocks_, parts = n < waves_.whole ? 1 : waves_.across * waves_.down;
    const uint32 in = place / parts, part = place % parts;
    if (n > waves_.whole || (n == waves_.whole && in >= waves_.left)) return false;
    locate(n * blocks_ + in, tile);
    tile.across = parts == 1 ? 1 : waves_.across;
    if (parts == 1) return true;
    tile.column += part % waves_.across * (static_cast<uint32>(kOut) / waves_.across);
    if (waves_.down != 1) {
      constexpr uint32 kHalf = kRows / static_cast<int>(moe_most_down({kRows, kColumns}));
      const uint32 first = part / waves_.across * kHalf, rows = tile.rows > first ? tile.rows - first : 0;
      tile.row += first, tile.rows = rows < kHalf ? rows : kHalf;
    }
    return tile.rows != 0 && tile.column < columns_;
  }

  ARK_DEVICE_INLINE const MoeWaves& waves() const { return waves_; }

 private:
  static ARK_DEVICE_INLINE uint32 heights(uint32 count) { return (count + kRows - 1) / kRows; }

  ARK_DEVICE_INLINE void locate(uint32 number, MoeTile& tile) {
    while (number >= end_) {
      first_ += count_;
      count_ = counts_.at(next_++);
      begin_ = end_, end_ += heights(count_) * column_tiles_;
    }
    const uint32 in = number - begin_, height = heights(count_), down = in % height * kRows;
    tile.expert = next_ - 1, tile.row = first_ + down;
    tile.rows = count_ - down < kRows ? count_ - down : kRows;
    tile.column = in / height * kOut;
  }

  Counts counts_;
  const uint32 columns_, column_tiles_, block_, blocks_;
  uint32 next_ = 0, begin_ = 0, end_ = 0;  // the next expert; tiles of the one before
  uint32 first_ = 0, count_ = 0;           // its rows
  const MoeWaves waves_;
};

#if defined(__CUDACC__)

// Numbers of rows in the device's memory, 32 at a time, one a lane.
class MoeCounts {
 public:
  __device__ __forceinline__ MoeCounts(const long long* counts, uint32 experts) : counts_(counts), experts_(experts) {}

  template <class F>
  __device__ __forceinline__ uint32 sum(F&& f) const {
    uint32 all = 0;
    ARK_ROLLED for (uint32 e = threadIdx.x % 32; e < experts_; e += 32) all += f(static_cast<uint32>(counts_[e]));
    return __reduce_add_sync(~0u, all);
  }
  __device__ __forceinline__ uint32 at(uint32 expert) {
    const uint32 mine = expert + threadIdx.x % 32;
    if (expert % 32 == 0) ahead_ = mine < experts_ ? static_cast<uint32>(counts_[mine]) : 0;
    return __shfl_sync(~0u, ahead_, expert % 32);
  }

 private:
  const long long* counts_;
  uint32 experts_;
  uint32 ahead_ = 0;
};

#endif

}  // namespace ark::device
