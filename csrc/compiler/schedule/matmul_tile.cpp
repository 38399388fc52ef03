// Estimates the time of each tile shape and picks the fastest. See matmul_tile.hpp.
#include "compiler/schedule/matmul_tile.hpp"

#include <algorithm>

#include "compiler/graph/stage_queries.hpp"

namespace ark::compiler {

namespace {

// Columns of the second matrices that a tile takes.
int64_t lines_of(const TileShape& tile, const MatmulStage& product) {
  return product.second.b >= 0 ? 2 * tile.columns : tile.columns;
}

double bytes_of_tile(const TileShape& tile, const MatmulStage& product, int64_t size) {
  return static_cast<double>((tile.rows + lines_of(tile, product)) * product.k * size);
}

constexpr double kTf32Pace = 0.5;  // of half types: tensor cores' instructions take half of their depth

double flops_per_us(const TileCosts& costs, const MatmulStage& product, int64_t size) {
  if (product.tf32) return kTf32Pace * costs.half_flops_per_us;
  return size == 1 ? costs.float8_flops_per_us : size == 2 ? costs.half_flops_per_us : costs.float_flops_per_us;
}

// Time of a tile apart from its multiplications.
double ends_us(const TileCosts& costs, const TileShape& tile, const MatmulStage& product) {
  const double element = costs.element_us + (product.finish.empty() ? 0 : costs.finished_us);
  return costs.start_us + element * static_cast<double>(tile.rows * tile.columns);
}

// Time of one worker's tiles, one after the other. `size`: bytes of an element.
double tiles_us(const TileCosts& costs, const TileShape& tile, const MatmulStage& product, int64_t size,
                int64_t tiles) {
  const double flops = 2 * static_cast<double>(tile.rows * lines_of(tile, product)) * static_cast<double>(product.k);
  const double compute = flops / flops_per_us(costs, product, size);
  const double move = bytes_of_tile(tile, product, size) / costs.bytes_per_us;
  return static_cast<double>(tiles) * (std::max(compute, move) + ends_us(costs, tile, product));
}

int64_t element_bytes(const Graph& graph, const MatmulStage& product) {
  return size_of(graph.values()[product.a].type);
}

}  // namespace

bool multiplied_in_tiles(const Graph& graph, const MatmulStage& product, const Target& target) {
  constexpr int64_t kDotRows = 4;  // kFewRows of cuda/loop/matmul.cuh for half types
  constexpr int64_t kLargeBytes = 16 << 20;
  if (product.batch != 1 || product.axis == MatmulStage::Axis::batch) return false;
  if (product.m > kMatvecRows) return true;
  // The tensor cores' kernel of few rows reads half lines, so tiles read large matrices faster; smaller ones have too
  // few tiles (docs/measurements.md).
  const Value &a = graph.values()[product.a], &b = graph.values()[product.b];
  return target.name == "sm_90a" && product.m > kDotRows && product.codes.bits == 0 && size_of(a.type) == 2 &&
         a.type == b.type && b.strides[b.shape.size() - 2] == 1 &&
         product.n * product.k * size_of(b.type) >= kLargeBytes;
}

int64_t blocks_of(int64_t m, int64_t rows) {
  return wholes(wholes(m, kRowUnit), rows / kRowUnit);
}

ChosenTile choose_tile(const Graph& graph, const MatmulStage& product, const Target& target, int64_t parts) {
  const TileCosts& costs = target.tiles;
  const Value& b = graph.values()[product.b];
  const bool along_depth = b.strides[b.shape.size() - 2] == 1;
  const int64_t size = element_bytes(graph, product);
  // Larger tiles bring fewer operands from the cache for each multiplication; warp groups alone have registers for
  // them, and in float32 none for a bias or an epilogue.
  const bool registers = size == 2 || (product.tf32 && product.bias < 0 && product.finish.empty());
  const bool large =
      target.name == "sm_90a" && registers && multiplied_by_groups(graph, product) && product.codes.bits == 0;
  const bool dual = product.second.b >= 0;
  ChosenTile best;
  for (const int64_t rows : {256, 128, 64}) {
    for (const int64_t lines : {256, 128, 96, 64, 32}) {
      // No such kernel variant.
      if (lines == 96 && (rows != 128 || !along_depth || dual || (size == 1 && !product.fast_accum))) continue;
      if (lines == 32 && dual) continue;
      if ((rows == 256 || lines == 256) && (!large || rows * lines != 256 * 128)) continue;
      const TileShape tile{rows, dual ? lines / 2 : lines};
      const int64_t across = wholes(product.n, tile.columns) + wholes(product.beside, tile.columns);
      const int64_t tiles = blocks_of(product.m, rows) * across * parts;
      const double move = static_cast<double>(tiles) * bytes_of_tile(tile, product, size) / costs.all_bytes_per_us;
      const double us = std::max(move + ends_us(costs, tile, product),
                                 tiles_us(costs, tile, product, size, wholes(tiles, target.workers)));
      if (best.rows == 0 || us < best.us) best = {rows, tile.columns, us};
    }
  }
  return best;
}

double product_tiles_us(const Graph& graph, const MatmulStage& product, const TileCosts& costs, int64_t columns) {
  const TileShape tile{product.tile_rows, product.tile_columns};
  return tiles_us(costs, tile, product, element_bytes(graph, product), wholes(columns, tile.columns));
}

}  // namespace ark::compiler
