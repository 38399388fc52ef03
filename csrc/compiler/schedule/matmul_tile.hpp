// The tiles in which a GPU computes a product of many rows: which shape, and what they take.
#pragma once

#include <cstdint>

#include "compiler/graph/stage.hpp"
#include "compiler/schedule/matmul_tile.hpp"

namespace ark::compiler {

inline constexpr int64_t kRowUnit = 8;  // blocks of rows begin at multiples: rows may be adjacent, 16 bytes each

struct TileShape {
  int64_t rows, columns;
};

inline int64_t wholes(int64_t count, int64_t whole) {
  return (count + whole - 1) / whole;
}

// Into how many blocks of at most `rows` rows m rows are divided: even ones, so that none is as small as to be computed
// in another way than the others.
int64_t blocks_of(int64_t m, int64_t rows);

// The tile's shape that the product should have beside `parts` - 1 others like it, and when all are done.
struct ChosenTile {
  int64_t rows = 0, columns = 0;
  double us = 0;
};
ChosenTile choose_tile(const Graph& graph, const MatmulStage& product, int workers, int64_t parts = 1);

// What so many columns of a product take whose tiles are chosen.
double product_tiles_us(const Graph& graph, const MatmulStage& product, int64_t columns);

}  // namespace ark::compiler
