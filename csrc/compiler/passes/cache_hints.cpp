// Mirrors the conditions by which the kernels in kernels/cuda/loop/ choose among their variants, since only some of the
// variants issue loads with a cache policy.
#include "compiler/passes/cache_hints.hpp"
#include "compiler/graph/stage_queries.hpp"

#include <algorithm>
#include <array>
#include <variant>

#include "compiler/passes/kv_append.hpp"

namespace ark::compiler {

namespace {

constexpr int64_t kTensorRows = 16;    // as in matvec_tensor.cuh
constexpr int64_t kSeparateRows = 16;  // as in experts.cuh
constexpr int64_t kFewQueries = 16;    // as in attention.cuh

const Value& value_at(const Plan& plan, int index) {
  return plan.graph.values()[static_cast<size_t>(index)];
}

int64_t per_chunk(const Value& value) {
  return 16 / size_of(value.type);
}

// Whether elements that are these strides apart start at multiples of 16 bytes.
bool lies_aligned(const Plan& plan, int index, const std::vector<int64_t>& strides) {
  const Value& value = value_at(plan, index);
  const int64_t per = per_chunk(value);
  return !is_packets(plan, index) && value.offset % per == 0 &&
         std::all_of(strides.begin(), strides.end(), [&](int64_t stride) { return stride % per == 0; });
}

// A matrix of `depth` by columns, with strides `depths` and `columns`.
struct Matrix {
  int index;
  int64_t depth, depths, columns;
  std::vector<int64_t> moved;  // strides of the batch dimensions
};

// Whether a product of this many rows streams the matrix past them in 16-byte loads; see product_of() of matmul.cuh.
bool is_streamed(const Plan& plan, Matrix matrix, int64_t rows, ScalarType of_rows) {
  const Value& value = value_at(plan, matrix.index);
  const bool depth_adjacent = matrix.depths == 1, across = !depth_adjacent && matrix.columns == 1;
  if (!depth_adjacent && !across) return false;
  matrix.moved.push_back(depth_adjacent ? matrix.columns : matrix.depths);
  if (!lies_aligned(plan, matrix.index, matrix.moved)) return false;
  const bool by_chunks = depth_adjacent && matrix.depth % per_chunk(value) == 0;
  if (rows <= 32 / per_chunk(value)) return across || by_chunks;
  return by_chunks && size_of(value.type) == 2 && value.type == of_rows && rows <= kTensorRows;
}

// Strides of the dimensions longer than 1.
std::vector<int64_t> moves(const Value& value, size_t dims) {
  std::vector<int64_t> strides;
  for (size_t d = 0; d < dims; ++d)
    if (value.shape[d] != 1) strides.push_back(value.strides[d]);
  return strides;
}

int64_t stride_or_one(const Value& value, size_t dim) {
  return value.shape[dim] == 1 ? 1 : value.strides[dim];
}

bool is_streamed(const Plan& plan, const MatmulStage& matmul) {
  const Value& b = value_at(plan, matmul.b);
  const size_t lead = b.shape.size() - 2;
  if (matmul.codes.bits != 0)  // dequant_tensor.cuh
    return matmul.m <= kTensorRows && size_of(value_at(plan, matmul.a).type) == 2 && b.shape[0] % per_chunk(b) == 0 &&
           lies_aligned(plan, matmul.b, {stride_or_one(b, 1)});
  return is_streamed(plan, {matmul.b, matmul.k, stride_or_one(b, lead), stride_or_one(b, lead + 1), moves(b, lead)},
                     matmul.m, value_at(plan, matmul.a).type);
}

bool is_streamed(const Plan& plan, const ExpertsStage& experts) {
  const Value &table = value_at(plan, experts.table), &out = value_at(plan, experts.out);
  const int64_t matrices = table.shape[0];
  int64_t rows = 1;
  for (size_t d = 0; d + 1 < out.shape.size(); ++d) rows *= out.shape[d];
  const int64_t in_tiles = size_of(table.type) == 2 ? rows : std::min<int64_t>(rows, 64);
  const bool separate = !experts.runs && rows <= kSeparateRows && rows <= matrices;
  const int64_t most = separate ? 1 : rows <= 8 * matrices ? std::min(rows, kTensorRows) : in_tiles;
  return is_streamed(
      plan, {experts.table, table.shape[1], stride_or_one(table, 1), stride_or_one(table, 2), {table.strides[0]}}, most,
      value_at(plan, experts.a).type);
}

bool is_streamed(const Plan& plan, const AttentionStage& attention) {
  const std::array operands = {attention.q, attention.k, attention.v};
  const Value &q = value_at(plan, attention.q), &k = value_at(plan, attention.k), &v = value_at(plan, attention.v);
  if (std::any_of(operands.begin(), operands.end(), [&](int one) { return value_at(plan, one).shape.size() != 4; }))
    return false;
  if (q.shape[1] / k.shape[1] * q.shape[2] > kFewQueries || k.shape[3] % per_chunk(k) != 0 ||
      v.shape[3] % per_chunk(v) != 0)
    return false;
  return std::all_of(operands.begin(), operands.end(), [&](int one) {
    const Value& value = value_at(plan, one);
    return stride_or_one(value, 3) == 1 && lies_aligned(plan, one, moves(value, 3));
  });
}

// Whether the stage's own code, not its tail's, loads or stores the access element by element or in runs.
bool by_elements(const Stage& stage, const Access& access) {
  using Kind = RowProgram::Instruction::Kind;
  if (const auto* program = std::get_if<RowProgram>(&stage.body))
    return std::any_of(program->code.begin(), program->code.end(), [&](const RowProgram::Instruction& one) {
      return one.kind == (access.write ? Kind::store : Kind::load) && one.value == access.value;
    });
  if (const auto* gather = std::get_if<GatherStage>(&stage.body))
    return access.value == (access.write ? gather->out : gather->table);
  const auto* bag = std::get_if<BagStage>(&stage.body);
  return bag != nullptr && access.value == (access.write ? bag->out : bag->table);
}

// Whether the CPU's code stores 16 adjacent columns at a time. For a GPU see by_elements().
bool stores_columns(const Plan& plan, const Stage& stage, const Access& access) {
  const auto* program = std::get_if<RowProgram>(&stage.body);
  if (program == nullptr || !access.write) return false;
  const Value& value = value_at(plan, access.value);
  return std::any_of(program->code.begin(), program->code.end(), [&](const RowProgram::Instruction& one) {
    return one.kind == RowProgram::Instruction::Kind::store && one.value == access.value && one.args.size() < 2 &&
           !value.strides.empty() && value.strides.back() == 1;
  });
}

}  // namespace

bool is_streamed_matrix(const Plan& plan, const Stage& stage, const Access& access) {
  if (access.write) return false;
  if (const auto* experts = std::get_if<ExpertsStage>(&stage.body))
    return access.value == experts->table && is_streamed(plan, *experts);
  const auto matmuls = matmuls_of(stage);
  return std::any_of(matmuls.begin(), matmuls.end(), [&](const MatmulStage& one) { return one.b == access.value; }) &&
         std::all_of(matmuls.begin(), matmuls.end(), [&](const MatmulStage& one) { return is_streamed(plan, one); });
}

bool is_streamed_state(const Plan& plan, const Stage& stage, const Access& access) {
  const AttentionStage* const attention = attention_of(stage);
  return attention != nullptr && !access.write && (access.value == attention->k || access.value == attention->v) &&
         is_streamed(plan, *attention);
}

bool is_packets(const Plan& plan, int value) {
  const auto buffer = static_cast<size_t>(value_at(plan, value).buffer);
  return buffer < plan.placements.size() && plan.placements[buffer].packets;
}

bool can_hint(const Plan& plan, const Stage& stage, const Access& access) {
  if (value_at(plan, access.value).is_literal()) return false;
  if (plan.target.name == "cpu") return stores_columns(plan, stage, access);
  if (is_packets(plan, access.value)) return false;
  return is_streamed_matrix(plan, stage, access) || is_streamed_state(plan, stage, access) ||
         by_elements(stage, access);
}

}  // namespace ark::compiler
