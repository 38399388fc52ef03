// The shape of products with collectives (matmul.cuh): a launch's parameters, how a result is cut into tiles, and the
// order in which a rank computes them.
#pragma once

#include "cuda/fused/tiles.cuh"

namespace ark::device {

enum class MatmulMode : int { all_reduce, reduce_scatter, all_gather };

// The driver's description of a matrix for the copy engine (CUtensorMap).
struct alignas(64) TensorMap {
  uint64 words[16];
};

struct MatmulParams {
  TensorMap a, gathered, b;  // gathered: rows of all ranks, as they arrive
  TileLinks links;           // to all_reduce's result, else to scratch
  char* scratch[kMaxRanks];  // of every rank, as mapped here: slots for sums, or gathered rows
  const char* rows;          // all_gather: this rank's a
  const char* bias;          // an element for each column, or null
  char* out;                 // of reduce_scatter and all_gather
  uint64 row_bytes;          // stride of a's rows; gathered rows are contiguous
  uint64 out_bytes;          // stride of the result's rows
  uint32 part_rows;          // rows that a rank owns or sends; all_reduce: all rows
  uint32 push_shift;         // all_gather: log2 of the rows in a group
  uint32 columns, depth;
  uint32 row_tiles, column_tiles;  // per part
  uint32 part_tiles;               // maximum
  uint32 tiles;                    // in all parts
};

// The shape of an instantiation, for host and device.
struct MatmulShape {
  int rows, columns;  // per tile

  static constexpr int kDepth = 64;        // of a stage: lines of 128 bytes
  static constexpr int kMost = 224 << 10;  // bytes of shared memory
  ARK_HOST_DEVICE constexpr int groups() const { return rows / 64; }
  ARK_HOST_DEVICE constexpr int warps() const { return groups() * 4; }  // those that multiply
  ARK_HOST_DEVICE constexpr int threads() const { return groups() * 128 + 128; }
  ARK_HOST_DEVICE constexpr int stage_bytes() const { return (rows + columns) * 128; }
  // A warp's output buffer: 16 rows, padded so that consecutive rows are in different banks.
  ARK_HOST_DEVICE constexpr int pitch() const { return columns * 2 + 16; }
  ARK_HOST_DEVICE constexpr int laid_bytes() const { return 16 * pitch(); }
  ARK_HOST_DEVICE constexpr int stages() const { return (kMost - 1024 - warps() * laid_bytes()) / stage_bytes(); }
  ARK_HOST_DEVICE constexpr int ring_bytes() const { return stages() * stage_bytes(); }
  ARK_HOST_DEVICE constexpr int shared_bytes() const { return 1024 + ring_bytes() + warps() * laid_bytes(); }
  ARK_HOST_DEVICE constexpr uint32 tile_bytes() const { return static_cast<uint32>(rows * columns * 2); }
};

// log2 of the fewest rows that a warp sends at a time, as a group with one flag. More rows make larger groups.
inline constexpr uint32 kPushShift = 2;

#if defined(__CUDACC__)

struct MatmulTile {
  int part;            // the rank that it belongs to
  uint32 number;       // index in the part
  uint32 row, column;  // its start in the part (all_reduce: in the matrix)
};

// The v-th tile in this rank's order: sums start with peers' parts, gathered rows with the own part.
template <int kRows, int kColumns, MatmulMode kMode>
__device__ __forceinline__ MatmulTile matmul_tile(const MatmulParams& p, uint32 v) {
  // Rows of tiles that are computed together: concurrent tiles then use as many rows of a as columns of b, for the
  // second-level cache.
  constexpr uint32 kBand = 2048 / kRows;
  const uint32 ranks = static_cast<uint32>(p.links.ranks);
  MatmulTile tile;
  uint32 part = static_cast<uint32>(p.links.rank) + (kMode == MatmulMode::all_gather ? 0 : 1), in;
  if (part >= ranks) part -= ranks;
  if constexpr (kMode == MatmulMode::all_reduce) {
    const auto first = [&](uint32 of) { return static_cast<uint32>(uint64{p.tiles} * of / ranks); };
    for (;;) {
      const uint32 count = first(part + 1) - first(part);
      if (v < count) break;
      v -= count;
      if (++part == ranks) part = 0;
    }
    in = first(part) + v;
  } else {
    part += v / p.part_tiles;
    if (part >= ranks) part -= ranks;
    in = v = v % p.part_tiles;
  }
  tile.part = static_cast<int>(part), tile.number = v;
  const uint32 band = in / (kBand * p.column_tiles);
  in -= band * kBand * p.column_tiles;
  const uint32 height = min(kBand, p.row_tiles - band * kBand);
  tile.row = (band * kBand + in % height) * kRows, tile.column = in / height * kColumns;
  return tile;
}

#endif

}  // namespace ark::device
