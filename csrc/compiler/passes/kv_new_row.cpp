// Recognizes the two forms in which a stage appends to a cache: a row program that stores through an index, and a
// scatter of rows made elsewhere.
#include "compiler/passes/kv_new_row.hpp"

#include <algorithm>

#include "compiler/fuse/fuse_views.hpp"

namespace ark::compiler {

namespace {

using Instruction = RowProgram::Instruction;
using Kind = Instruction::Kind;

bool of_one_element(const Value& value) {
  return value.elements() == 1 && (value.type == ScalarType::i64 || value.type == ScalarType::i32);
}

// The view in which the heads of all sequences are one dimension, as attention reads them (attention_stage() of
// fuse_single.cpp); the value itself if there is none.
Value with_merged_batch(Value value) {
  if (value.shape.size() != 4 || value.shape[0] == 1 || !merges(value, 0, value.shape[1])) return value;
  merge(value, 0);
  value.shape.insert(value.shape.begin(), 1);
  value.strides.insert(value.strides.begin(), 0);
  return value;
}

// A program that stores its rows straight into the cache.
std::optional<NewRow> row_of_program(const Graph& graph, const Stage& writer, const Value& cache) {
  const auto value = [&](int index) -> const Value& { return graph.values()[static_cast<size_t>(index)]; };
  NewRow row{writer, {}, 0, {}};
  auto& program = std::get<RowProgram>(row.stage.body);
  Instruction* const store = only_store(program);
  if (store == nullptr || store->args.size() != 2 || program.axis < 0) return std::nullopt;
  const Instruction& index = program.code[static_cast<size_t>(store->args[1])];
  if (index.kind != Kind::load || !of_one_element(value(index.value))) return std::nullopt;
  const Value& view = value(store->value);
  const auto axis = static_cast<size_t>(program.axis);
  const int64_t heads = cache.shape[1], columns = cache.shape[3];
  if (view.type != cache.type || program.shape[axis] != heads || store->strides[axis] != cache.strides[1] ||
      store->through.stride != cache.strides[2])
    return std::nullopt;
  row.row = view;
  row.row.offset = 0;
  row.row.shape = program.shape;
  row.row.strides.resize(program.shape.size());
  for (size_t d = 0; d < program.shape.size(); ++d) {
    int64_t& stride = row.row.strides[d];
    stride = d == axis ? columns : program.shape[d] == 1 ? 0 : store->strides[d] / cache.strides[3];
    if (d != axis && program.shape[d] > 1 &&
        (store->strides[d] % cache.strides[3] != 0 || stride * (program.shape[d] - 1) >= columns))
      return std::nullopt;
  }
  row.cache = view.offset;
  row.place = {
      .position = index.value, .size = store->through.size, .dim = store->through.dim, .wrap = store->through.wrap};
  store->args.pop_back();
  store->through = {};
  store->strides = row.row.strides;
  return row;
}

// A scatter that copies rows unchanged.
std::optional<NewRow> row_of_scatter(Graph& graph, const Stage& writer, const ScatterStage& scatter,
                                     const Value& cache) {
  const auto value = [&](int index) -> const Value& { return graph.values()[static_cast<size_t>(index)]; };
  const Value base = with_merged_batch(value(scatter.base)), source = with_merged_batch(value(scatter.source));
  const int64_t heads = cache.shape[1], columns = cache.shape[3];
  if (base.shape.size() != 4 || scatter.dim != 2 || scatter.along || scatter.accumulate ||
      !of_one_element(value(scatter.index)) || source.shape != Shape{1, heads, 1, columns} || base.type != cache.type ||
      source.type != cache.type || base.shape[0] != 1 || base.shape[1] != heads || base.shape[3] != columns ||
      !std::equal(base.strides.begin() + 1, base.strides.end(), cache.strides.begin() + 1))
    return std::nullopt;
  NewRow row;
  row.stage = writer;
  row.row.type = cache.type;
  row.row.shape = {heads, columns};
  row.row.strides = {columns, 1};
  row.cache = base.offset;
  row.sequences = value(scatter.base).shape[0];
  row.place = {.position = scatter.index, .size = base.shape[2], .dim = scatter.dim, .wrap = scatter.wrap};
  Value from = source;
  from.shape = row.row.shape;
  from.strides = {source.strides[1], source.strides[3]};
  Instruction load, store;
  load.kind = Kind::load;
  load.value = view_value(graph, from);
  load.type = source.type;
  load.strides = from.strides;
  store.kind = Kind::store;
  store.args = {0};
  store.type = source.type;
  store.strides = row.row.strides;
  RowProgram program;
  program.shape = row.row.shape;
  program.inner = 1;
  program.axis = 0;
  program.code = {load, store};
  row.stage.body = program;
  row.stage.accesses = {{load.value, 0, false}};
  return row;
}

}  // namespace

std::optional<NewRow> new_row(Graph& graph, const Stage& writer, const Value& cache) {
  if (!writer.tail.empty()) return std::nullopt;
  if (const auto* scatter = std::get_if<ScatterStage>(&writer.body))
    return row_of_scatter(graph, writer, *scatter, cache);
  return std::holds_alternative<RowProgram>(writer.body) ? row_of_program(graph, writer, cache) : std::nullopt;
}

RowProgram::Instruction* only_store(RowProgram& program) {
  Instruction* found = nullptr;
  for (Instruction& one : program.code) {
    if (one.kind == Kind::reduce || (one.kind == Kind::store && (found != nullptr || one.scalar))) return nullptr;
    if (one.kind == Kind::store) found = &one;
  }
  return found;
}

}  // namespace ark::compiler
