// Finds elementwise programs that alone read a product's result, and makes them the product's epilogue. See
// epilogue_fusion.hpp.
#include "compiler/passes/epilogue_fusion.hpp"
#include "compiler/graph/stage_queries.hpp"
#include "compiler/schedule/matmul_tile.hpp"

#include <utility>

#include "compiler/fuse/fuse_views.hpp"
#include "compiler/passes/elementwise.hpp"

namespace ark::compiler {

namespace {

// The stage that can become the product's epilogue because it alone reads the product's result; else -1.
int finisher(const Graph& graph, const std::vector<Stage>& stages, int at, const Target& target) {
  const auto& product = std::get<MatmulStage>(stages[at].body);
  const Value& out = graph.values()[product.out];
  if (!multiplied_in_tiles(graph, product, target) || product.codes.bits != 0 || !product.finish.empty() ||
      !is_floating(out.type) || graph.buffers()[out.buffer].kind != Buffer::Kind::temporary)
    return -1;
  const int reader = only_reader(graph, stages, at, out.buffer);
  const auto* program = reader < 0 ? nullptr : std::get_if<RowProgram>(&stages[reader].body);
  if (program == nullptr) return -1;
  const Elementwise one = elementwise(graph, *program);
  if (one.loads.size() != 1 || !replaces(graph, *program, *one.loads[0], out)) return -1;
  // The store moves ahead of the stages in between, so none of them may touch that buffer.
  const int stored = graph.values()[one.store->value].buffer;
  for (int between = at; between < reader; ++between)
    if (stored != out.buffer && touches(graph, stages[between], stored)) return -1;
  return reader;
}

}  // namespace

std::vector<Stage> fuse_epilogues(Graph& graph, std::vector<Stage> stages, const Target& target) {
  for (int at = 0; at < static_cast<int>(stages.size()); ++at) {
    if (!std::holds_alternative<MatmulStage>(stages[at].body)) continue;
    const int by = finisher(graph, stages, at, target);
    if (by < 0) continue;
    Stage& stage = stages[at];
    auto& product = std::get<MatmulStage>(stage.body);
    const auto& program = std::get<RowProgram>(stages[by].body);
    const Elementwise one = elementwise(graph, program);
    const int out = view_value(graph, finished_value(graph, product.out, *one.loads[0], *one.store));
    for (Access& access : stage.accesses)
      if (access.write) access.value = out;
    product.out = out;
    product.finish = program.code;
    stage.flops += stages[by].flops;
    stage.bytes = bytes_of(graph, {product.a, product.b, product.out});
    stage.name += "+" + stages[by].name;
    stage.origin += "; " + stages[by].origin;
    stages.erase(stages.begin() + by);
  }
  return stages;
}

}  // namespace ark::compiler
