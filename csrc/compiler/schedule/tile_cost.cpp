// The estimated time of a tile: the longer of its arithmetic and its movement of bytes. See tile.hpp.
#include <algorithm>

#include "compiler/graph/box.hpp"
#include "compiler/graph/stage_queries.hpp"
#include "compiler/schedule/attention_kernel.hpp"
#include "compiler/schedule/matmul_tile.hpp"
#include "compiler/schedule/tile.hpp"

namespace ark::compiler {

namespace {

// Attention of warp groups: indices [begin, end) of the stage's axis, each a KV head or an element of the batch.
double attention_us(const Graph& graph, const Stage& stage, const AttentionStage& attention, int64_t tiles) {
  const Value &q = graph.values()[attention.q], &k = graph.values()[attention.k], &v = graph.values()[attention.v];
  const auto heads = static_cast<double>(k.shape[0] * k.shape[1]);  // each with keys of its own
  const auto scores = static_cast<double>(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]);
  const double attended = stage.flops / (2 * scores * static_cast<double>(k.shape[3] + v.shape[3]));
  const int64_t rows = q.shape[1] / k.shape[1] * q.shape[2];
  return attention_task_us(graph, attention, rows, attended) * heads * static_cast<double>(tiles) /
         static_cast<double>(stage.extent);
}

}  // namespace

double tile_cost_us(const Graph& graph, const Stage& stage, const Target& target, int64_t begin, int64_t end) {
  const auto* matmul = std::get_if<MatmulStage>(&stage.body);
  if (matmul != nullptr && matmul->tile_columns > 0)
    return product_tiles_us(graph, *matmul, target.tiles, end - begin) + target.task_us;
  const auto* attention = std::get_if<AttentionStage>(&stage.body);
  if (attention != nullptr && target.name == "sm_90a" && attention_kernel(graph, *attention) != AttentionKernel::plain)
    return attention_us(graph, stage, *attention, end - begin) + target.task_us;
  const double part = static_cast<double>(end - begin) / static_cast<double>(std::max<int64_t>(1, stage.extent));
  double total = 0;   // bytes of all accesses
  double near = 0;    // bytes of those to temporaries
  double shared = 0;  // bytes of those that every tile reads whole
  for (const Access& access : stage.accesses) {
    const Value& value = graph.values()[access.value];
    if (value.is_literal()) continue;
    const auto bytes = static_cast<double>(box_of(value).bytes());
    total += bytes;
    if (graph.buffers()[value.buffer].kind == Buffer::Kind::temporary) near += bytes;
    if (access.axis < 0) shared += bytes;
  }
  // A gather touches less than its table; only the stage's own byte count is reliable then.
  if (total > 1.05 * stage.bytes) shared = 0;
  near = std::min(near, stage.bytes);
  // All threads of a combine issue all their loads at once.
  const double pace = std::holds_alternative<CombineStage>(stage.body) ? 0.5 : 1;
  const double share = stage.bytes > 0 ? (stage.bytes * part + shared * (1 - part)) / stage.bytes : 0;
  const double move = share * (near / target.cached_bytes_per_us + (stage.bytes - near) / target.bytes_per_us);
  const bool product = matmul != nullptr || std::holds_alternative<ProductsStage>(stage.body) ||
                       attention_of(stage) != nullptr || std::holds_alternative<ExpertsStage>(stage.body);
  const double compute = stage.flops * part / (product ? target.flops_per_us : target.pointwise_per_us);
  return std::max(compute, pace * move) + target.task_us;
}

}  // namespace ark::compiler
