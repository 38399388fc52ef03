// Stages with a kernel in the device library: matrix products and collectives. The text binds shapes and strides as
// constants, loops over the batch dimensions, and takes the tile's part.
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "compiler/emit/cpu/emit_cpu_loops.hpp"
#include "compiler/emit/cpu/emit_cpu_ops.hpp"
#include "compiler/graph/stage_queries.hpp"
#include "compiler/schedule/matmul_tile.hpp"

namespace ark::compiler {

namespace {

// A dimension of length 1 may have any stride.
int64_t stride(const Value& value, size_t from_end, int64_t otherwise) {
  return value.shape[value.shape.size() - from_end] == 1 ? otherwise : value.strides[value.shape.size() - from_end];
}

// The alignment flags of a and of b, or of both matrices of a dual product.
std::array<std::string, 2> aligned_operands(FunctionWriter& to, const MatmulStage& matmul) {
  const Shape& shape = to.value(matmul.out).shape;
  const Shape batch = slice(shape, 0, shape.size() - 2);
  const auto lines = [&](int matrix, int64_t otherwise) {
    const Value& value = to.value(matrix);
    return aligned_lines(to, matrix, {stride(value, 2, otherwise), stride(value, 1, 1)},
                         broadcast_strides(value, 2, batch));
  };
  std::array<std::string, 2> flags{lines(matmul.a, 0), lines(matmul.b, 1)};
  if (matmul.second.b >= 0)
    if (const std::string second = lines(matmul.second.b, 1); flags[1] != "false" && second != "true")
      flags[1] = second;
  return flags;
}

}  // namespace

std::string product_shape(FunctionWriter& to, const MatmulStage& matmul) {
  const Value &a = to.value(matmul.a), &b = to.value(matmul.b), &out = to.value(matmul.out);
  int64_t bias_row = 0, bias_column = 0;
  if (matmul.bias >= 0) {
    bias_row = stride_from_end(to.value(matmul.bias), 2);
    bias_column = stride_from_end(to.value(matmul.bias), 1);
  }
  std::string aligned;  // and what else GPUs' kernels alone have
  if (to.cuda()) {
    const auto [of_a, of_b] = aligned_operands(to, matmul);
    aligned = formatted(",\n                      .a_aligned = {}, .b_aligned = {}, .b_cache = {}", of_a, of_b,
                        to.cache_text(matmul.b));
    if (matmul.tf32) aligned += ", .tf32 = true";
  }
  return formatted(
      "{{.depth = {}, .a_row = {}, .a_depth = {}, .b_depth = {}, .b_column = {},\n"
      "                      .out_row = {}, .out_column = {}, .bias_row = {}, .bias_column = {}{}}}",
      matmul.k, stride(a, 2, 0), stride(a, 1, 1), stride(b, 2, 1), stride(b, 1, 1), stride(out, 2, 0),
      stride(out, 1, 1), bias_row, bias_column, aligned);
}

namespace {

// The erf that only instruction `i` reads, to add 1 to it as in GELU; -1 if there is none.
int erf_beside_one(const FunctionWriter& to, const std::vector<RowProgram::Instruction>& code, size_t i) {
  using Kind = RowProgram::Instruction::Kind;
  const auto is_one = [&](int arg) {
    const RowProgram::Instruction& one = code[static_cast<size_t>(arg)];
    return one.kind == Kind::literal && to.value(one.value).literal == 1;
  };
  const auto is_erf = [&](int arg) {
    const RowProgram::Instruction& one = code[static_cast<size_t>(arg)];
    size_t uses = 0;
    for (const auto& other : code) uses += static_cast<size_t>(std::ranges::count(other.args, arg));
    return one.kind == Kind::op && one.name == "erf" && one.type == ScalarType::f32 && uses == 1;
  };
  if (code[i].kind != Kind::op || code[i].name != "add") return -1;
  const int a = code[i].args.at(0), b = code[i].args.at(1);
  return is_erf(a) && is_one(b) ? a : is_erf(b) && is_one(a) ? b : -1;
}

// Writes the epilogue as a function of a sum with its bias, or of both sums of a dual product, which returns the
// element to store.
void define_finish(FunctionWriter& to, const MatmulStage& matmul) {
  using Kind = RowProgram::Instruction::Kind;
  RowProgram program;
  program.code = matmul.finish;
  const RowExpressions expressions(to, program);
  const bool halves = size_of(to.value(matmul.out).type) == 2;
  std::vector<int> erfs(program.code.size(), -1);  // by instruction: the erf that this addition of 1 computes along
                                                   // with it
  for (size_t i = 0; i < erfs.size() && halves; ++i) erfs[i] = erf_beside_one(to, program.code, i);
  to.open("const auto finish = [](float sum{})", matmul.second.b >= 0 ? ", float second" : "");
  for (size_t i = 0; i < program.code.size(); ++i) {
    const RowProgram::Instruction& one = program.code[i];
    expressions.check(one);
    if (std::ranges::count(erfs, static_cast<int>(i)) > 0) continue;
    std::string expression;
    if (one.kind == Kind::load) {
      expression = RowExpressions::rounded(one, one.value == matmul.second.sum ? "second" : "sum");
    } else if (erfs[i] >= 0) {
      const int of = program.code[static_cast<size_t>(erfs[i])].args.at(0);
      expression =
          RowExpressions::rounded(one, formatted("one_plus_erf_for_halves({})", expressions.argument(of, "Floats")));
    } else if (one.kind == Kind::op) {
      expression = expressions.call(one);
    } else if (one.kind == Kind::store) {
      to.line("return {};", expressions.argument(one.args.at(0), "Floats"));
    }
    if (!expression.empty())
      to.line("const {} {} = {};", lanes_of(one.type), RowExpressions::name(static_cast<int>(i)), expression);
  }
  to.close("};");
}

}  // namespace

void emit(FunctionWriter& to, const MatmulStage& matmul) {
  if (matmul.codes.bits != 0) return emit_dequant_matmul(to, matmul);
  const Value &a = to.value(matmul.a), &b = to.value(matmul.b), &out = to.value(matmul.out);
  const bool scaled = matmul.scale_a >= 0, dual = matmul.second.b >= 0;
  for (const int one : {matmul.a, matmul.b, matmul.out})
    if (!is_floating(to.value(one).type) && !scaled)
      to.refuse("it multiplies matrices of {}", name_of(to.value(one).type));
  const Shape batch = slice(out.shape, 0, out.shape.size() - 2);
  const auto a_batch = broadcast_strides(a, 2, batch), b_batch = broadcast_strides(b, 2, batch),
             out_batch = broadcast_strides(out, 2, batch);

  using Axis = MatmulStage::Axis;
  std::string r0 = "0", r1 = formatted("{}", matmul.m), c0 = "0", c1 = formatted("{}", matmul.n);
  if (matmul.axis == Axis::rows) r0 = to.tile_begin(matmul.m), r1 = to.tile_end(matmul.m);
  if (matmul.axis == Axis::columns) c0 = to.tile_begin(matmul.n), c1 = to.tile_end(matmul.n);

  TextNest nest(to, batch, matmul.axis == Axis::batch ? to.axis_of(matmul.out, true) : -1, "b", true);
  const std::vector<std::string>& indices = nest.names();
  // In a loop each address is reloaded, so that registers hold no more than that.
  const bool loops = to.cuda() && std::ranges::any_of(indices, [](const std::string& one) { return one != "0"; });
  const auto place = [&](int value, bool write, const std::vector<int64_t>& strides) {
    return loops ? formatted("now({})", at(to.pointer_later(value, write), indices, strides))
                 : at(to.pointer(value, write), indices, strides);
  };
  const std::string a_at = place(matmul.a, false, a_batch);
  const std::string b_at = place(matmul.b, false, b_batch);
  const std::string out_at = place(matmul.out, true, out_batch);
  const auto bias_place = [&](int value) -> std::string {
    if (value < 0) return "static_cast<const NoBias*>(nullptr)";
    const Value& bias = to.value(value);
    std::vector<int64_t> bias_batch(batch.size(), 0);
    if (bias.shape.size() > 2) bias_batch = broadcast_strides(bias, 2, batch);
    return place(value, false, bias_batch);
  };
  std::string bias_at = bias_place(matmul.bias);
  to.line("constexpr Product s{};", product_shape(to, matmul));
  if (scaled) {
    const Value &rows = to.value(matmul.scale_a), &columns = to.value(matmul.scale_b);
    to.line("const auto scales = scaled_by<{}, {}>({}, {}, {});", stride_from_end(rows, 2), stride_from_end(columns, 1),
            to.pointer(matmul.scale_a, false), to.pointer(matmul.scale_b, false), bias_at);
    bias_at = "&scales";
  }
  if (!matmul.finish.empty()) {
    if (!to.cuda()) to.refuse("a product that is finished as it is made");
    define_finish(to, matmul);
    if (dual)
      to.line("const auto finished = dual_by({}, {}, finish);", bias_at, bias_place(matmul.second.bias));
    else
      to.line("const auto finished = finished_by({}, finish);", bias_at);
    bias_at = "&finished";
  }
  const std::string matrices = dual ? b_at + ", " + place(matmul.second.b, false, b_batch) : b_at;
  const std::string operands =
      formatted("{}, {}, {}, {}, {}, {}, {}, {}", a_at, matrices, out_at, bias_at, r0, r1, c0, c1);
  if (to.cuda()) {
    // Strides select the kernel.
    std::string tile;
    if (matmul.tile_columns > 0) {
      tile = formatted(", {}, {}", matmul.tile_rows, matmul.tile_columns);
      if (multiplied_by_groups(to.graph(), matmul) && std::ranges::count(aligned_operands(to, matmul), "false") == 0)
        to.multiply_by_groups();
    }
    if (scaled)
      to.line("scaled_product<{}, s{}, {}>({});", matmul.m, tile, matmul.fast_accum, operands);
    else if (dual)
      to.line("dual_product<s{}>({});", tile, operands);
    else
      to.line("product<{}, s{}>({});", matmul.m, tile, operands);
  } else {
    // kRowBlock of matmul.hpp is at most 48 rows; packed in pairs of vectors by scaled.hpp.
    const int64_t vectors = scaled ? 32 : 16;
    const int64_t scratch = to.scratch(std::min<int64_t>(matmul.m, 48) * wholes(matmul.k, vectors) * vectors * 4);
    if (scaled)
      to.line("scaled_product<{}, s>({}, {});", matmul.m, operands, to.scratch_at(scratch));
    else
      to.line("product<{}{}>(s, {}, {});", matmul.m, to.prefetch_text(matmul.b), operands, to.scratch_at(scratch));
  }
  nest.close();
}

namespace {

// After the operands come the place of the packets and the collective's number; over several nodes its lane, too.
void emit_exchange(FunctionWriter& to, const CollectiveStage& collective, const std::string& input,
                   const std::string& output) {
  if (collective.ranks == 0) to.refuse("the size of its group is not known");
  const Node& node = to.graph().nodes()[static_cast<size_t>(to.stage().node)];
  const bool reduces = node.attributes.count("reduce_op") != 0;
  const int64_t size = size_of(to.value(collective.input).type);
  const char* type = "boolean";  // a name of DType in cuda/dtype.cuh
  switch (to.value(collective.input).type) {
    case ScalarType::f32: type = "f32"; break;
    case ScalarType::bf16: type = "bf16"; break;
    case ScalarType::f16: type = "f16"; break;
    case ScalarType::i64: type = "i64"; break;
    case ScalarType::i32: type = "i32"; break;
    default: break;
  }
  const std::string bytes = size == 1 ? "" : formatted(" * {}", size);
  const size_t operands = to.operands().size();
  if (collective.nodes > 1)
    return to.line(
        "all_reduce_between<ark::device::DType::{0}, ark::device::ReduceOp::{1}, {2}>(context, {3}, {4}, p[{5}], "
        "p[{6}], p[{7}], {8}, {9}, {10}, begin{11}, end{11});",
        type, node.text("reduce_op"), collective.ranks, input, output, operands, operands + 1, operands + 2,
        collective.half, collective.chunk, to.stage().extent * size, bytes);
  to.line(
      "exchange<Exchange::{0}, ark::device::DType::{1}, ark::device::ReduceOp::{2}, {3}>(context, {4}, {5}, p[{6}], "
      "p[{7}], {8}, {9}, begin{10}, end{10});",
      node.op, type, reduces ? node.text("reduce_op") : "sum", collective.ranks, input, output, operands, operands + 1,
      collective.half, to.stage().extent * size, bytes);
}

}  // namespace

void emit(FunctionWriter& to, const CollectiveStage& collective) {
  const std::string input = to.pointer(collective.input, false), output = to.pointer(collective.output, true);
  if (to.cuda()) return emit_exchange(to, collective, input, output);
  to.line("collective(context, {}, {}, {});", to.stage().node, input, output);
}

void emit(FunctionWriter& to, const StopStage& stop) {
  to.line("if (load_one({}) != 0) *{}.stop = true;", to.pointer(stop.value, false), to.cuda() ? "worker()" : "context");
}

}  // namespace ark::compiler
