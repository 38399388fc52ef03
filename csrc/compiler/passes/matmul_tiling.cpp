// Splits products into blocks of rows and sets the grain of their columns. See matmul_tiling.hpp.
#include "compiler/passes/matmul_tiling.hpp"
#include "compiler/graph/stage_queries.hpp"
#include "compiler/schedule/matmul_tile.hpp"

#include <algorithm>
#include <utility>

#include "compiler/fuse/fuse_single.hpp"
#include "compiler/fuse/fuse_views.hpp"

namespace ark::compiler {

namespace {

constexpr int64_t kMatvecColumns = 8;   // columns that a warp takes together in the kernel for few rows
constexpr int64_t kAcrossColumns = 32;  // the same where lanes run along the columns

enum Dim : size_t { kColumns = 1, kRows = 2 };  // from the last one on

// A view of rows or columns [begin, end); the value itself if it has one for all, or -1.
int part_of(Graph& graph, int index, Dim from_end, int64_t begin, int64_t end) {
  if (index < 0) return index;
  Value value = graph.values()[index];
  const size_t dim = value.shape.size() - from_end;
  if (value.shape[dim] == 1) return index;
  value.offset += begin * value.strides[dim];
  value.shape[dim] = end - begin;
  return view_value(graph, value);
}

// Whether codes are decoded into tiles of half types (dequant_tiles.cuh), which warp groups multiply.
bool decoded_in_tiles(const Graph& graph, const MatmulStage& product, const Target& target) {
  constexpr int64_t kBytes = 16, kCodes = 16;  // of a row, copied at once; of a column, decoded by a thread
  const Value &a = graph.values()[product.a], &b = graph.values()[product.b];
  const auto whole = [&](const Value& value, size_t adjacent) {
    return value.strides[adjacent] == 1 && value.strides[1 - adjacent] * size_of(value.type) % kBytes == 0 &&
           value.offset * size_of(value.type) % kBytes == 0;
  };
  return target.name == "sm_90a" && size_of(a.type) == 2 && product.codes.block == 0 && product.k % kCodes == 0 &&
         product.codes.group % kCodes == 0 && whole(a, 1) && whole(b, 0);
}

void cut_by_columns(const Graph& graph, Stage& stage, MatmulStage& body, int64_t grain) {
  body.axis = MatmulStage::Axis::columns;
  stage.extent = body.n;
  stage.grain = grain;
  stage.accesses = product_accesses(graph, body);
}

// Columns whose tiles in all blocks of rows precede those of the next columns. Workers that run at the same time then
// share few columns of b, each of which is read from memory once, where b as a whole would be read again for every
// block of rows because the cache does not keep it.
int64_t columns_at_once(const Graph& graph, const MatmulStage& product, const TileShape& tile, const Target& target) {
  const Value& b = graph.values()[product.b];
  const int64_t blocks = blocks_of(product.m, tile.rows);
  const int64_t bytes = (product.second.b >= 0 ? 2 : 1) * product.n * product.k * size_of(b.type);
  if (blocks == 1 || product.codes.bits != 0 || bytes <= target.caches.bytes / 2) return product.n;
  return wholes(target.workers, blocks) * tile.columns;
}

// Adds a stage for every block of rows of columns [first, past).
void add_row_blocks(Graph& graph, const Stage& stage, const TileShape& tile, int64_t first, int64_t past,
                    std::vector<Stage>& split) {
  const auto& product = std::get<MatmulStage>(stage.body);
  const auto part_of_all = [&](int index, int64_t begin, int64_t end) {
    return part_of(graph, part_of(graph, index, kRows, begin, end), kColumns, first, past);
  };
  const int64_t units = wholes(product.m, kRowUnit), blocks = blocks_of(product.m, tile.rows);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = units * block / blocks * kRowUnit;
    const int64_t end = std::min(product.m, units * (block + 1) / blocks * kRowUnit);
    Stage part = stage;
    auto& body = std::get<MatmulStage>(part.body);
    body.a = part_of(graph, body.a, kRows, begin, end);
    body.scale_a = part_of(graph, body.scale_a, kRows, begin, end);
    if (past - first < product.n) {
      body.b = part_of(graph, body.b, kColumns, first, past);
      body.second.b = part_of(graph, body.second.b, kColumns, first, past);
      body.scale_b = part_of(graph, body.scale_b, kColumns, first, past);
    }
    body.bias = part_of_all(body.bias, begin, end);
    body.second.bias = part_of_all(body.second.bias, begin, end);
    body.out = part_of_all(body.out, begin, end);
    body.m = end - begin;
    body.n = past - first;
    body.tile_rows = tile.rows;
    body.tile_columns = tile.columns;
    cut_by_columns(graph, part, body, tile.columns);
    part.flops = stage.flops * static_cast<double>(body.m * body.n) / static_cast<double>(product.m * product.n);
    part.bytes = product_bytes(graph, body);
    split.push_back(std::move(part));
  }
}

}  // namespace

std::vector<Stage> tile_matmuls(Graph& graph, std::vector<Stage> stages, const Target& target) {
  std::vector<Stage> split;
  for (Stage& stage : stages) {
    const auto* product = std::get_if<MatmulStage>(&stage.body);
    if (product == nullptr || product->batch != 1 || product->axis == MatmulStage::Axis::batch) {
      split.push_back(std::move(stage));
      continue;
    }
    const bool coded = product->codes.bits != 0 && !decoded_in_tiles(graph, *product, target);
    if (coded || (product->tile_rows == 0 && !multiplied_in_tiles(graph, *product, target))) {
      auto& body = std::get<MatmulStage>(stage.body);
      const Value& b = graph.values()[body.b];
      const bool along_depth = b.strides[b.shape.size() - 2] == 1;
      cut_by_columns(graph, stage, body, along_depth ? kMatvecColumns : kAcrossColumns);
      split.push_back(std::move(stage));
      continue;
    }
    TileShape tile{product->tile_rows, product->tile_columns};
    if (tile.rows == 0) {
      const ChosenTile chosen = choose_tile(graph, *product, target);
      tile = {chosen.rows, chosen.columns};
    }
    const int64_t band = columns_at_once(graph, *product, tile, target);
    for (int64_t first = 0; first < product->n; first += band)
      add_row_blocks(graph, stage, tile, first, std::min(product->n, first + band), split);
  }
  return split;
}

}  // namespace ark::compiler
