// See elementwise.hpp.
#include "compiler/passes/elementwise.hpp"

#include <algorithm>

namespace ark::compiler {

namespace {

using Instruction = RowProgram::Instruction;
using Kind = Instruction::Kind;

int64_t elements_of(const Shape& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

}  // namespace

Elementwise elementwise(const Graph& graph, const RowProgram& program) {
  Elementwise found;
  for (const Instruction& one : program.code) {
    if (one.kind == Kind::index || one.kind == Kind::reduce) return {};
    if (one.kind == Kind::load) found.loads.push_back(&one);
    if (one.kind != Kind::store) continue;
    if (found.store != nullptr) return {};
    found.store = &one;
  }
  if (found.store == nullptr || !is_floating(graph.values()[found.store->value].type)) return {};
  for (const Instruction* const load : found.loads)
    for (size_t d = 0; d < program.shape.size(); ++d)
      if (program.shape[d] != 1 && (load->strides[d] != found.store->strides[d] || load->strides[d] == 0)) return {};
  return found;
}

bool replaces(const Graph& graph, const RowProgram& program, const Instruction& load, const Value& out) {
  return graph.values()[load.value].buffer == out.buffer && load.type == out.type &&
         elements_of(program.shape) == elements_of(out.shape);
}

bool touches(const Graph& graph, const Stage& stage, int buffer) {
  return std::any_of(stage.accesses.begin(), stage.accesses.end(),
                     [&](const Access& access) { return graph.values()[access.value].buffer == buffer; });
}

int only_reader(const Graph& graph, const std::vector<Stage>& stages, int at, int buffer) {
  int reader = -1;
  for (int other = 0; other < static_cast<int>(stages.size()); ++other) {
    if (other == at || !touches(graph, stages[other], buffer)) continue;
    if (reader >= 0 || other < at) return -1;
    reader = other;
  }
  return reader;
}

Value finished_value(const Graph& graph, int out, const Instruction& load, const Instruction& store) {
  Value value = graph.values()[out];
  const Value &loaded = graph.values()[load.value], &stored = graph.values()[store.value];
  value.offset += stored.offset - loaded.offset;
  value.buffer = stored.buffer;
  value.type = stored.type;
  return value;
}

}  // namespace ark::compiler
