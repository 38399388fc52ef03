// Estimates whether splitting a product along its depth pays, and makes the parts. See split_k.hpp.
#include "compiler/passes/split_k.hpp"
#include "compiler/graph/stage_queries.hpp"
#include "compiler/schedule/matmul_tile.hpp"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "compiler/fuse/fuse_views.hpp"
#include "compiler/passes/matmul_tiling.hpp"

namespace ark::compiler {

namespace {

using Kind = RowProgram::Instruction::Kind;

constexpr int64_t kMostDepthParts = 5;  // a row program has no registers for more
constexpr int64_t kDepthUnit = 64;      // depths that the kernel multiplies at once
constexpr double kWorthUs = 1;          // time that the extra stages must save
constexpr int64_t kPieceBytes = 16;     // loaded at once: each part starts at a multiple

// Whether its parts can be summed: half types or TF32 (plain float32 keeps its order), and a dense result that fills a
// temporary.
bool has_parts(const Graph& graph, const MatmulStage& product, const Target& target) {
  const Value &a = graph.values()[product.a], &out = graph.values()[product.out];
  const Buffer& buffer = graph.buffers()[out.buffer];
  if (!multiplied_in_tiles(graph, product, target) || product.codes.bits != 0 || !product.finish.empty() ||
      (size_of(a.type) != 2 && !product.tf32) || !is_floating(out.type))
    return false;
  const int64_t elements = product.m * product.n;
  return buffer.kind == Buffer::Kind::temporary && buffer.bytes == elements * size_of(out.type) && out.offset == 0 &&
         out.strides[out.shape.size() - 1] == 1 && out.strides[out.shape.size() - 2] == product.n &&
         elements * size_of(ScalarType::f32) % kPieceBytes == 0;
}

// The row programs of a stage and of those that its tasks run next.
template <class AnyStage>
std::vector<AnyStage*> programs_of(AnyStage& stage) {
  std::vector<AnyStage*> found;
  if (std::holds_alternative<RowProgram>(stage.body)) found.push_back(&stage);
  for (AnyStage& next : stage.tail)
    if (std::holds_alternative<RowProgram>(next.body)) found.push_back(&next);
  return found;
}

// Whether the stage, or one that its tasks run next, reads the buffer and is no row program.
bool read_otherwise(const Graph& graph, const Stage& stage, int buffer) {
  if (!std::holds_alternative<RowProgram>(stage.body)) return true;
  return std::any_of(stage.tail.begin(), stage.tail.end(), [&](const Stage& next) {
    return !std::holds_alternative<RowProgram>(next.body) &&
           std::any_of(next.accesses.begin(), next.accesses.end(),
                       [&](const Access& access) { return graph.values()[access.value].buffer == buffer; });
  });
}

// The stage whose row programs are the buffer's only readers, later and element by element, and read no other parts;
// else -1.
int only_reader(const Graph& graph, const std::vector<Stage>& stages, int at, int buffer) {
  int reader = -1;
  for (int other = 0; other < static_cast<int>(stages.size()); ++other) {
    if (other == at) continue;
    for (const Access& access : stages[other].accesses) {
      if (graph.values()[access.value].buffer != buffer) continue;
      if (access.write || other < at || (reader >= 0 && reader != other)) return -1;
      reader = other;
    }
  }
  if (reader < 0 || read_otherwise(graph, stages[reader], buffer)) return -1;
  for (const Stage* const one : programs_of(stages[reader])) {
    bool loads = false, has_parts = false;
    for (const auto& instruction : std::get<RowProgram>(one->body).code) {
      has_parts = has_parts || instruction.parts.count > 1;
      if (instruction.kind != Kind::load || graph.values()[instruction.value].buffer != buffer) continue;
      if (instruction.scalar) return -1;
      loads = true;
    }
    if (loads && has_parts) return -1;  // registers suffice for the parts of one value
  }
  return reader;
}

// A view of depths [begin, end) of dimension `dim`.
int depths_of(Graph& graph, int index, size_t dim, int64_t begin, int64_t end) {
  Value value = graph.values()[index];
  value.offset += begin * value.strides[dim];
  value.shape[dim] = end - begin;
  return view_value(graph, value);
}

struct DepthParts {
  int64_t count = 1;
  ChosenTile tile;
};
DepthParts choose_parts(const Graph& graph, const MatmulStage& product, const Target& target) {
  DepthParts best{1, choose_tile(graph, product, target)};
  best.tile.us -= kWorthUs;
  const int64_t units = (product.k + kDepthUnit - 1) / kDepthUnit;
  for (int64_t parts = 2; parts <= std::min(units, kMostDepthParts); ++parts) {
    MatmulStage part = product;
    part.k = (units + parts - 1) / parts * kDepthUnit;
    ChosenTile tile = choose_tile(graph, part, target, parts);
    // Partial results are written and read again, from the second-level cache as operands are.
    tile.us += static_cast<double>(2 * parts * product.m * (product.n + product.beside) * size_of(ScalarType::f32)) /
               target.tiles.all_bytes_per_us;
    if (tile.us < best.tile.us) best = {parts, tile};
  }
  return best;
}

// Counts the columns of other products of the same rows and depth. Tiles that fill the workers are then those of all of
// them: smaller ones, with which one product alone would, read more per operation.
void count_beside(const Graph& graph, std::vector<Stage>& stages, const Target& target) {
  std::map<std::tuple<int, int64_t, int64_t>, int64_t> columns;
  const auto each = [&](const auto& call) {
    for (Stage& stage : stages)
      if (auto* product = std::get_if<MatmulStage>(&stage.body);
          product != nullptr && multiplied_in_tiles(graph, *product, target) && product->second.b < 0)
        call(*product, columns[{product->a, product->m, product->k}]);
  };
  each([](const MatmulStage& product, int64_t& all) { all += product.n; });
  each([](MatmulStage& product, int64_t all) { product.beside = all - product.n; });
}

// Turns the reader's loads of the result into sums of `count` parts in buffer `sums`. Each part has the result's
// layout, one after the other.
void read_parts(Graph& graph, Stage& reader, const Value& result, int sums, int64_t count) {
  const int64_t apart = result.elements();
  std::map<int, int> views;
  const auto parts_of = [&](int index) {
    const auto known = views.find(index);
    if (known != views.end()) return known->second;
    Value value = graph.values()[index];
    value.buffer = sums;
    value.type = ScalarType::f32;
    value.shape.insert(value.shape.begin(), count);
    value.strides.insert(value.strides.begin(), apart);
    return views[index] = view_value(graph, value);
  };
  const auto redirect = [&](std::vector<Access>& accesses) {
    for (Access& access : accesses) {
      if (graph.values()[access.value].buffer != result.buffer) continue;
      access.value = parts_of(access.value);
      if (access.axis >= 0) ++access.axis;
    }
  };
  redirect(reader.accesses);
  for (Stage& next : reader.tail) redirect(next.accesses);
  for (Stage* const one : programs_of(reader))
    for (auto& instruction : std::get<RowProgram>(one->body).code) {
      if (instruction.kind != Kind::load || graph.values()[instruction.value].buffer != result.buffer) continue;
      instruction.value = parts_of(instruction.value);
      instruction.parts = {count, apart};
    }
  reader.bytes += static_cast<double>(apart * (count * size_of(ScalarType::f32) - size_of(result.type)));
}

}  // namespace

std::vector<Stage> split_k(Graph& graph, std::vector<Stage> stages, const Target& target) {
  std::vector<Stage> split;
  count_beside(graph, stages, target);
  for (int at = 0; at < static_cast<int>(stages.size()); ++at) {
    const auto* product = std::get_if<MatmulStage>(&stages[at].body);
    const bool divisible = product != nullptr && has_parts(graph, *product, target);
    const DepthParts parts = divisible ? choose_parts(graph, *product, target) : DepthParts{};
    const int reader = parts.count > 1 ? only_reader(graph, stages, at, graph.values()[product->out].buffer) : -1;
    if (reader < 0) {
      split.push_back(std::move(stages[at]));
      continue;
    }
    const Value result = graph.values()[product->out];
    const int64_t elements = result.elements();
    Buffer buffer;
    buffer.bytes = parts.count * elements * size_of(ScalarType::f32);
    const int sums = graph.add_buffer(buffer);
    read_parts(graph, stages[reader], result, sums, parts.count);
    const int64_t units = (product->k + kDepthUnit - 1) / kDepthUnit;
    for (int64_t index = 0; index < parts.count; ++index) {
      const int64_t begin = units * index / parts.count * kDepthUnit;
      const int64_t end = std::min(product->k, units * (index + 1) / parts.count * kDepthUnit);
      Stage part = stages[at];
      auto& body = std::get<MatmulStage>(part.body);
      body.a = depths_of(graph, body.a, graph.values()[body.a].shape.size() - 1, begin, end);
      body.b = depths_of(graph, body.b, graph.values()[body.b].shape.size() - 2, begin, end);
      Value out = result;
      out.buffer = sums;
      out.type = ScalarType::f32;
      out.offset = index * elements;
      body.out = view_value(graph, out);
      if (index > 0) body.bias = -1;
      body.k = end - begin;
      body.tile_rows = parts.tile.rows;
      body.tile_columns = parts.tile.columns;
      part.flops = stages[at].flops * static_cast<double>(body.k) / static_cast<double>(product->k);
      part.bytes = bytes_of(graph, {body.a, body.b, body.out});
      split.push_back(std::move(part));
    }
  }
  return split;
}

}  // namespace ark::compiler
