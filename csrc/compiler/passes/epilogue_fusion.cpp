// Finds elementwise programs that alone read a product's result, and makes them the product's epilogue. See
// epilogue_fusion.hpp.
#include "compiler/passes/epilogue_fusion.hpp"
#include "compiler/graph/stage_queries.hpp"

#include <algorithm>
#include <utility>

#include "compiler/fuse/fuse_views.hpp"
#include "compiler/passes/matmul_tiling.hpp"

namespace ark::compiler {

namespace {

using Kind = RowProgram::Instruction::Kind;

bool touches(const Graph& graph, const Stage& stage, int buffer) {
  return std::any_of(stage.accesses.begin(), stage.accesses.end(),
                     [&](const Access& access) { return graph.values()[access.value].buffer == buffer; });
}

// The load and the store of a program that computes each element of one value from the same element of another.
struct Elementwise {
  const RowProgram::Instruction* load = nullptr;
  const RowProgram::Instruction* store = nullptr;
};
Elementwise elementwise(const Graph& graph, const RowProgram& program) {
  Elementwise found;
  for (const RowProgram::Instruction& one : program.code) {
    if (one.kind == Kind::index || one.kind == Kind::reduce) return {};
    const RowProgram::Instruction** const part = one.kind == Kind::load    ? &found.load
                                                 : one.kind == Kind::store ? &found.store
                                                                           : nullptr;
    if (part == nullptr) continue;
    if (*part != nullptr) return {};
    *part = &one;
  }
  if (found.load == nullptr || found.store == nullptr) return {};
  for (size_t d = 0; d < program.shape.size(); ++d)
    if (program.shape[d] != 1 && (found.load->strides[d] != found.store->strides[d] || found.load->strides[d] == 0))
      return {};
  return is_floating(graph.values()[found.store->value].type) ? found : Elementwise{};
}

int64_t elements_of(const Shape& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

// The stage that can become the product's epilogue because it alone reads the product's result; else -1.
int finisher(const Graph& graph, const std::vector<Stage>& stages, int at) {
  const auto& product = std::get<MatmulStage>(stages[at].body);
  const Value& out = graph.values()[product.out];
  if (!multiplied_in_tiles(product) || product.codes.bits != 0 || !product.finish.empty() || !is_floating(out.type) ||
      graph.buffers()[out.buffer].kind != Buffer::Kind::temporary)
    return -1;
  int reader = -1;
  for (int other = 0; other < static_cast<int>(stages.size()); ++other) {
    if (other == at || !touches(graph, stages[other], out.buffer)) continue;
    if (reader >= 0 || other < at) return -1;
    reader = other;
  }
  const auto* program = reader < 0 ? nullptr : std::get_if<RowProgram>(&stages[reader].body);
  if (program == nullptr) return -1;
  const Elementwise one = elementwise(graph, *program);
  if (one.load == nullptr || graph.values()[one.load->value].buffer != out.buffer || one.load->type != out.type ||
      elements_of(program->shape) != elements_of(out.shape))
    return -1;
  // The store moves ahead of the stages in between, so none of them may touch that buffer.
  const int stored = graph.values()[one.store->value].buffer;
  for (int between = at; between < reader; ++between)
    if (stored != out.buffer && touches(graph, stages[between], stored)) return -1;
  return reader;
}

// The value that the epilogue stores in place of the product's result.
Value finished(const Graph& graph, const MatmulStage& product, const Elementwise& by) {
  Value value = graph.values()[product.out];
  const Value &loaded = graph.values()[by.load->value], &stored = graph.values()[by.store->value];
  value.offset += stored.offset - loaded.offset;
  value.buffer = stored.buffer;
  value.type = stored.type;
  return value;
}

}  // namespace

std::vector<Stage> fuse_epilogues(Graph& graph, std::vector<Stage> stages, const Target&) {
  for (int at = 0; at < static_cast<int>(stages.size()); ++at) {
    if (!std::holds_alternative<MatmulStage>(stages[at].body)) continue;
    const int by = finisher(graph, stages, at);
    if (by < 0) continue;
    Stage& stage = stages[at];
    auto& product = std::get<MatmulStage>(stage.body);
    const auto& program = std::get<RowProgram>(stages[by].body);
    const int out = view_value(graph, finished(graph, product, elementwise(graph, program)));
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
