// See split_products.hpp.
#include "plan/split_products.hpp"

#include <algorithm>
#include <utility>

#include "plan/fuse_views.hpp"

namespace ark::plan {

namespace {

constexpr int64_t kMatvecRows = 16;     // cuda/loop/matmul.cuh: every column by itself
constexpr int64_t kMatvecColumns = 8;   // that a warp takes together there
constexpr int64_t kAcrossColumns = 32;  // where lanes run along the columns
constexpr int64_t kTensorRows = 128;    // of a tile on tensor cores

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

std::vector<Stage> split_products(Graph& graph, std::vector<Stage> stages, int workers) {
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
    const int64_t blocks = (product->m + kTensorRows - 1) / kTensorRows;
    const int64_t grain = blocks * (product->n / 64) >= workers ? 64 : 32;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = product->m * block / blocks / 16 * 16;
      const int64_t end = block + 1 == blocks ? product->m : product->m * (block + 1) / blocks / 16 * 16;
      Stage part = stage;
      auto& body = std::get<MatmulStage>(part.body);
      body.a = rows_of(graph, body.a, begin, end);
      if (body.bias >= 0) body.bias = rows_of(graph, body.bias, begin, end);
      body.out = rows_of(graph, body.out, begin, end);
      body.m = end - begin;
      cut_by_columns(graph, part, body, grain);
      part.flops = stage.flops * static_cast<double>(body.m) / static_cast<double>(product->m);
      part.bytes = bytes_of(graph, {body.a, body.b, body.out});
      split.push_back(std::move(part));
    }
  }
  return split;
}

}  // namespace ark::plan
