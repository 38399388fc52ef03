// The order in which one kernel multiplies a rank's experts (moe_layer.cuh): tiles of the first product, then of the
// second, as numbered tasks that blocks take one after the other. Plain C++, tested by
// tests/csrc/kernels/moe_tasks_test.cpp.
#pragma once

#include "cuda/fused/matmul_shape.cuh"

namespace ark::device {

// Order. A tile of the second product reads all columns of its rows of the first product, so it comes after these. Most
// tiles of the second product come last. Blocks end together only if their number is a multiple of the blocks, so the
// first ones, as many as are left over, come earlier: where the tiles that they read have been taken a whole wave
// before. Tiles that share a part of a matrix are adjacent, so that it is read from memory once.
//
// Every task depends only on tasks with lower numbers. So blocks that take tasks in order always proceed.

struct MoeTask {
  enum Kind : uint32 { none = 0, first = 1, second = 2 };
  uint32 kind;
  uint32 expert;  // of this rank
  uint32 row;     // in the rank's rows
  uint32 down;    // in the expert's rows
  uint32 rows;    // existing ones
  uint32 column;  // of the product
  uint32 group;   // of rows: group_of()
};

// The number of a group of an expert's rows, for counters. Groups of different experts have different numbers, which
// any rank can compute: `start` is the expert's first row.
ARK_HOST_DEVICE constexpr uint32 group_of(uint32 start, uint32 expert, uint32 down, uint32 tile_rows) {
  return start / tile_rows + expert + down / tile_rows;
}

struct MoeTaskShape {
  const uint32* starts;  // [experts + 1]: first row of each of this rank's experts, plus `base`
  uint32 base, experts;
  uint32 tiles[2];    // of columns, of each product
  uint32 columns[2];  // of a tile
  uint32 blocks;
};

// Finds tasks by number, in increasing order.
template <uint32 kRows>
class MoeTasks {
 public:
  ARK_HOST_DEVICE explicit MoeTasks(const MoeTaskShape& shape) : shape_(shape) {
    uint32 heights = 0;
    for (uint32 e = 0; e < shape.experts; ++e) heights += height_of(e);
    firsts_ = heights * shape.tiles[0], seconds_ = heights * shape.tiles[1];
    early_ = seconds_ < shape.blocks ? 0 : seconds_ % shape.blocks;
    before_ = firsts_;
    if (early_ == 0) return;
    uint32 read = 0, e = 0;  // groups of rows that early tiles read, by whole experts
    while (read * shape.tiles[1] < early_) read += height_of(e++);
    const uint32 after = read * shape.tiles[0] + shape.blocks;
    before_ = after < firsts_ ? after : firsts_;
  }

  ARK_HOST_DEVICE uint32 count() const { return firsts_ + seconds_; }

  ARK_HOST_DEVICE bool find(uint32 number, MoeTask& task) {
    if (number >= count()) return false;
    if (number < before_)
      locate(cursors_[0], 0, number, task);
    else if (number < before_ + early_)
      locate(cursors_[1], 1, number - before_, task);
    else if (number < firsts_ + early_)
      locate(cursors_[0], 0, number - early_, task);
    else
      locate(cursors_[1], 1, number - firsts_, task);
    return true;
  }

 private:
  struct Cursor {
    uint32 next = 0, begin = 0, end = 0, height = 1;  // the next expert; tiles of the one before
  };

  ARK_HOST_DEVICE uint32 rows_of(uint32 e) const { return shape_.starts[e + 1] - shape_.starts[e]; }
  ARK_HOST_DEVICE uint32 height_of(uint32 e) const { return (rows_of(e) + kRows - 1) / kRows; }

  ARK_HOST_DEVICE void locate(Cursor& cursor, int product, uint32 tile, MoeTask& task) const {
    while (tile >= cursor.end) {
      cursor.height = height_of(cursor.next++);
      cursor.begin = cursor.end, cursor.end += cursor.height * shape_.tiles[product];
    }
    const uint32 in = tile - cursor.begin, e = cursor.next - 1;
    const uint32 start = shape_.starts[e] - shape_.base, rows = rows_of(e);
    task.kind = product == 0 ? MoeTask::first : MoeTask::second;
    task.expert = e, task.down = in % cursor.height * kRows, task.row = start + task.down;
    task.rows = rows - task.down < kRows ? rows - task.down : kRows;
    task.column = in / cursor.height * shape_.columns[product];
    task.group = group_of(start, e, task.down, kRows);
  }

  const MoeTaskShape shape_;
  Cursor cursors_[2];
  uint32 firsts_, seconds_;  // tiles of each product
  uint32 early_, before_;    // tiles of the second product that come early; of the first that come before these
};

}  // namespace ark::device
