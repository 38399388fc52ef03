// See stage_queries.hpp.
#include "compiler/graph/stage_queries.hpp"

#include <variant>

namespace ark::compiler {

namespace {

constexpr int64_t kRowsInWarps = 16;  // at most this many query rows per head: warps split the positions

}  // namespace

const AttentionStage* attention_of(const Stage& stage) {
  return std::get_if<AttentionStage>(&(stage.tail.empty() ? stage : stage.tail.back()).body);
}

int few_rows_of(const Stage& stage) {
  constexpr int64_t kMostRows = 4;  // kFewRows of cuda/loop/matmul.cuh for half types
  if (const auto* several = std::get_if<ProductsStage>(&stage.body))
    return several->products.at(0).m <= kMostRows ? several->products[0].a : -1;
  const auto* one = std::get_if<MatmulStage>(&stage.body);
  const bool few = one != nullptr && one->batch == 1 && one->m <= kMostRows &&
                   one->axis == MatmulStage::Axis::columns && one->tile_columns == 0;
  return few ? one->a : -1;
}

bool multiplies_float8(const Stage& stage) {
  const auto* product = std::get_if<MatmulStage>(&stage.body);
  return product != nullptr && product->scale_a >= 0;
}

bool multiplied_by_groups(const Graph& graph, const MatmulStage& product) {
  const Value &a = graph.values()[product.a], &b = graph.values()[product.b];
  if (size_of(a.type) <= 2) return true;
  const auto adjacent = [](const Value& value, size_t from_end) {
    const size_t dim = value.shape.size() - from_end;
    return value.shape[dim] == 1 || value.strides[dim] == 1;
  };
  return product.tf32 && adjacent(a, 1) && adjacent(b, 2);
}

bool takes_few_rows(const Graph& graph, const AttentionStage& attention) {
  const Value &q = graph.values()[attention.q], &k = graph.values()[attention.k];
  return q.shape[1] / k.shape[1] * q.shape[2] <= kRowsInWarps;
}

bool is_spread(const Stage& stage) {
  const auto* body = std::get_if<CollectiveStage>(&stage.body);
  return body != nullptr && body->ranks > 0;
}

std::vector<Push> pushed_buffers(const Graph& graph, const std::vector<Stage>& stages) {
  std::vector<Push> found(graph.buffers().size());
  for (const Stage& stage : stages)
    for (const MatmulStage& one : matmuls_of(stage))
      if (one.push.ranks > 0) found[graph.values()[one.out].buffer] = one.push;
  return found;
}

}  // namespace ark::compiler
