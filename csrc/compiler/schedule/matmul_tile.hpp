// The tile shapes in which a GPU computes a product of many rows, and the estimate of time by which one is chosen.
#pragma once

#include <cstdint>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

inline constexpr int64_t kRowUnit = 8;  // row blocks start at multiples: with contiguous rows that is 16 bytes

// Of the result. A tile of a dual product takes as many columns of both matrices.
struct TileShape {
  int64_t rows, columns;
};

inline int64_t wholes(int64_t count, int64_t whole) {
  return (count + whole - 1) / whole;
}

// Whether a GPU computes the product in tiles of several rows, and not each column on its own (cuda/loop/matmul.cuh).
bool multiplied_in_tiles(const Graph& graph, const MatmulStage& product, const Target& target);

// The number of blocks of at most `rows` rows for m rows. Blocks are even, so that none is small enough to be computed
// by another algorithm.
int64_t blocks_of(int64_t m, int64_t rows);

// The best tile shape for the product and those beside it when `parts` - 1 like them run concurrently, and the time for
// all.
struct ChosenTile {
  int64_t rows = 0, columns = 0;
  double us = 0;
};
ChosenTile choose_tile(const Graph& graph, const MatmulStage& product, const Target& target, int64_t parts = 1);

// Estimated time of this many columns of a product whose tile shape is set.
double product_tiles_us(const Graph& graph, const MatmulStage& product, const TileCosts& costs, int64_t columns);

}  // namespace ark::compiler
