// Estimates the time of each tile shape and picks the fastest. See matmul_tile.hpp.
#include "compiler/schedule/matmul_tile.hpp"

#include <algorithm>

namespace ark::compiler {

namespace {

// Rates on an H200: of a tile's kernel on one SM, and of all SMs together at the second-level cache.
constexpr double kHalfFlopsPerUs = 5.5e6, kFloatFlopsPerUs = 3e5, kTileBytesPerUs = 7.4e4, kAllBytesPerUs = 8e6;
constexpr double kFloat8FlopsPerUs = 8e6;           // assumed, not measured
constexpr double kTileUs = 2.3, kElementUs = 4e-5;  // filling the ring and a wait; storing an element
constexpr double kFinishedUs = 6e-5;                // additional per element with an epilogue (an activation)

double bytes_of_tile(const TileShape& tile, int64_t depth, int64_t size) {
  return static_cast<double>((tile.rows + tile.columns) * depth * size);
}

double flops_per_us(int64_t size) {
  return size == 1 ? kFloat8FlopsPerUs : size == 2 ? kHalfFlopsPerUs : kFloatFlopsPerUs;
}

// Time of a tile apart from its multiplications.
double ends_us(const TileShape& tile, const MatmulStage& product) {
  const double element = kElementUs + (product.finish.empty() ? 0 : kFinishedUs);
  return kTileUs + element * static_cast<double>(tile.rows * tile.columns);
}

// Time of one worker's tiles, one after the other. `size`: bytes of an element.
double tiles_us(const TileShape& tile, const MatmulStage& product, int64_t size, int64_t tiles) {
  const double flops = 2 * static_cast<double>(tile.rows * tile.columns) * static_cast<double>(product.k);
  const double compute = flops / flops_per_us(size);
  const double move = bytes_of_tile(tile, product.k, size) / kTileBytesPerUs;
  return static_cast<double>(tiles) * std::max(compute, move) + ends_us(tile, product);
}

int64_t element_bytes(const Graph& graph, const MatmulStage& product) {
  return size_of(graph.values()[product.a].type);
}

}  // namespace

int64_t blocks_of(int64_t m, int64_t rows) {
  return wholes(wholes(m, kRowUnit), rows / kRowUnit);
}

ChosenTile choose_tile(const Graph& graph, const MatmulStage& product, int workers, int64_t parts) {
  const Value& b = graph.values()[product.b];
  const bool along_depth = b.strides[b.shape.size() - 2] == 1;
  const int64_t size = element_bytes(graph, product);
  ChosenTile best;
  for (const int64_t rows : {128, 64}) {
    for (const int64_t columns : {128, 96, 64, 32}) {
      // No such kernel variant.
      if (columns == 96 && (rows != 128 || !along_depth || (size == 1 && !product.fast_accum))) continue;
      const TileShape tile{rows, columns};
      const int64_t tiles = blocks_of(product.m, rows) * wholes(product.n, columns) * parts;
      const double move = static_cast<double>(tiles) * bytes_of_tile(tile, product.k, size) / kAllBytesPerUs;
      const double us = std::max(move + ends_us(tile, product), tiles_us(tile, product, size, wholes(tiles, workers)));
      if (best.rows == 0 || us < best.us) best = {rows, columns, us};
    }
  }
  return best;
}

double product_tiles_us(const Graph& graph, const MatmulStage& product, int64_t columns) {
  const TileShape tile{product.tile_rows, product.tile_columns};
  return tiles_us(tile, product, element_bytes(graph, product), wholes(columns, tile.columns));
}

}  // namespace ark::compiler
