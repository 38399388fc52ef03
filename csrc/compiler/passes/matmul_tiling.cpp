// See matmul_tiling.hpp.
#include "compiler/passes/matmul_tiling.hpp"

#include <algorithm>
#include <utility>

#include "compiler/fuse/fuse_views.hpp"

namespace ark::compiler {

namespace {

constexpr int64_t kMatvecRows = 16;     // cuda/loop/matmul.cuh: every column by itself
constexpr int64_t kMatvecColumns = 8;   // that a warp takes together there
constexpr int64_t kAcrossColumns = 32;  // where lanes run along the columns
constexpr int64_t kRowUnit = 8;         // blocks of rows begin at multiples: rows may be adjacent, 16 bytes each

// What a tile's kernel reaches on one SM, and all of them at the second-level cache, on an H200.
constexpr double kHalfFlopsPerUs = 5.5e6, kFloatFlopsPerUs = 3e5, kTileBytesPerUs = 7.4e4, kAllBytesPerUs = 8e6;
constexpr double kTileUs = 2.3, kElementUs = 4e-5;  // the ring fills, a wait; results are stored
constexpr double kFinishedUs = 6e-5;                // more, of an element that is finished (an activation)

struct TileShape {
  int64_t rows, columns;
};

int64_t wholes(int64_t count, int64_t whole) {
  return (count + whole - 1) / whole;
}

double bytes_of_tile(const TileShape& tile, int64_t depth, bool halves) {
  return static_cast<double>((tile.rows + tile.columns) * depth * (halves ? 2 : 4));
}

// What a tile takes beside its multiplications.
double ends_us(const TileShape& tile, const MatmulStage& product) {
  const double element = kElementUs + (product.finish.empty() ? 0 : kFinishedUs);
  return kTileUs + element * static_cast<double>(tile.rows * tile.columns);
}

// Tiles of one worker, one after the other.
double tiles_us(const TileShape& tile, const MatmulStage& product, bool halves, int64_t tiles) {
  const double flops = 2 * static_cast<double>(tile.rows * tile.columns) * static_cast<double>(product.k);
  const double compute = flops / (halves ? kHalfFlopsPerUs : kFloatFlopsPerUs);
  const double move = bytes_of_tile(tile, product.k, halves) / kTileBytesPerUs;
  return static_cast<double>(tiles) * std::max(compute, move) + ends_us(tile, product);
}

bool of_halves(const Graph& graph, const MatmulStage& product) {
  return size_of(graph.values()[product.a].type) == 2;
}

// Even blocks of at most so many rows; none is as small as to be computed in another way than the others.
int64_t blocks_of(int64_t m, int64_t rows) {
  return wholes(wholes(m, kRowUnit), rows / kRowUnit);
}

// Rows [begin, end) of the last dimension but one; all where there is one for all.
int rows_of(Graph& graph, int index, int64_t begin, int64_t end) {
  Value value = graph.values()[index];
  const size_t dim = value.shape.size() - 2;
  if (value.shape[dim] == 1) return index;
  value.offset += begin * value.strides[dim];
  value.shape[dim] = end - begin;
  return view_value(graph, value);
}

void cut_by_columns(const Graph& graph, Stage& stage, MatmulStage& body, int64_t grain) {
  body.axis = MatmulStage::Axis::columns;
  stage.extent = body.n;
  stage.grain = grain;
  const auto last = static_cast<int>(graph.values()[body.out].shape.size()) - 1;
  stage.accesses = {{body.a, -1, false}, {body.b, last, false}};
  if (body.bias >= 0) {
    const Value& bias = graph.values()[body.bias];
    stage.accesses.push_back({body.bias, bias.strides[bias.shape.size() - 1] != 0 ? last : -1, false});
  }
  stage.accesses.push_back({body.out, body.n > 1 ? last : -1, true});
}

}  // namespace

bool multiplied_in_tiles(const MatmulStage& product) {
  return product.batch == 1 && product.axis != MatmulStage::Axis::batch && product.m > kMatvecRows;
}

ChosenTile choose_tile(const Graph& graph, const MatmulStage& product, int workers, int64_t parts) {
  const Value& b = graph.values()[product.b];
  const bool along_depth = b.strides[b.shape.size() - 2] == 1, halves = of_halves(graph, product);
  ChosenTile best;
  for (const int64_t rows : {128, 64}) {
    for (const int64_t columns : {128, 96, 64, 32}) {
      if (columns == 96 && (rows != 128 || !along_depth)) continue;  // the kernel has none
      const TileShape tile{rows, columns};
      const int64_t tiles = blocks_of(product.m, rows) * wholes(product.n, columns) * parts;
      const double move = static_cast<double>(tiles) * bytes_of_tile(tile, product.k, halves) / kAllBytesPerUs;
      const double us =
          std::max(move + ends_us(tile, product), tiles_us(tile, product, halves, wholes(tiles, workers)));
      if (best.rows == 0 || us < best.us) best = {rows, columns, us};
    }
  }
  return best;
}

double product_tiles_us(const Graph& graph, const MatmulStage& product, int64_t columns) {
  const TileShape tile{product.tile_rows, product.tile_columns};
  return tiles_us(tile, product, of_halves(graph, product), wholes(columns, tile.columns));
}

std::vector<Stage> tile_matmuls(Graph& graph, std::vector<Stage> stages, int workers) {
  std::vector<Stage> split;
  for (Stage& stage : stages) {
    const auto* product = std::get_if<MatmulStage>(&stage.body);
    if (product == nullptr || product->batch != 1 || product->axis == MatmulStage::Axis::batch) {
      split.push_back(std::move(stage));
      continue;
    }
    if (product->m <= kMatvecRows) {
      auto& body = std::get<MatmulStage>(stage.body);
      const Value& b = graph.values()[body.b];
      const bool along_depth = b.strides[b.shape.size() - 2] == 1;
      cut_by_columns(graph, stage, body, along_depth ? kMatvecColumns : kAcrossColumns);
      split.push_back(std::move(stage));
      continue;
    }
    TileShape tile{product->tile_rows, product->tile_columns};
    if (tile.rows == 0) {
      const ChosenTile chosen = choose_tile(graph, *product, workers);
      tile = {chosen.rows, chosen.columns};
    }
    const int64_t units = wholes(product->m, kRowUnit), blocks = blocks_of(product->m, tile.rows);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = units * block / blocks * kRowUnit;
      const int64_t end = std::min(product->m, units * (block + 1) / blocks * kRowUnit);
      Stage part = stage;
      auto& body = std::get<MatmulStage>(part.body);
      body.a = rows_of(graph, body.a, begin, end);
      if (body.bias >= 0) body.bias = rows_of(graph, body.bias, begin, end);
      body.out = rows_of(graph, body.out, begin, end);
      body.m = end - begin;
      body.tile_rows = tile.rows;
      body.tile_columns = tile.columns;
      cut_by_columns(graph, part, body, tile.columns);
      part.flops = stage.flops * static_cast<double>(body.m) / static_cast<double>(product->m);
      part.bytes = bytes_of(graph, {body.a, body.b, body.out});
      split.push_back(std::move(part));
    }
  }
  return split;
}

}  // namespace ark::compiler
