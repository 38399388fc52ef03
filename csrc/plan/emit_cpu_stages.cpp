// Stages that the device library has a kernel for: matrix products, attention, gather, scatter. The text binds shapes
// and strides as constants, walks the batch dimensions, and takes the tile's part.
#include <algorithm>
#include <string>
#include <vector>

#include "plan/emit_cpu_function.hpp"

namespace ark::plan {

namespace {

// Strides of a value's dimensions as broadcast to `shape`'s `rank` leading ones, aligned at the end of both.
std::vector<int64_t> broadcast_strides(const Value& value, size_t behind, const Shape& shape) {
  std::vector<int64_t> strides(shape.size(), 0);
  const size_t leading = value.shape.size() - behind;
  for (size_t i = 0; i < leading && i < shape.size(); ++i) {
    const size_t from = leading - 1 - i, to = shape.size() - 1 - i;
    strides[to] = value.shape[from] == 1 ? 0 : value.strides[from];
  }
  return strides;
}

// The stride of a dimension counted from the end; 0 where it is not there or broadcast.
int64_t stride_from_end(const Value& value, size_t from_end) {
  if (value.shape.size() < from_end) return 0;
  const size_t d = value.shape.size() - from_end;
  return value.shape[d] == 1 ? 0 : value.strides[d];
}

std::string number(int64_t value) {
  return std::to_string(value);
}

std::string at(const std::string& pointer, const std::vector<std::string>& indices,
               const std::vector<int64_t>& strides) {
  const std::string offset = cpp_offset(indices, strides);
  return offset == "0" ? pointer : pointer + " + " + offset;
}

// Loops over dimensions, of which one may be cut by tiles; those of length 1 become "0".
class Nest {
 public:
  Nest(FunctionWriter& to, const Shape& shape, int axis, const std::string& prefix) : to_(to) {
    for (size_t d = 0; d < shape.size(); ++d) {
      const bool cut = static_cast<int>(d) == axis;
      if (shape[d] == 1 && !cut) {
        names_.push_back("0");
        continue;
      }
      const std::string name = prefix + number(static_cast<int64_t>(d));
      names_.push_back(name);
      to_.open("for (int64_t " + name + " = " + (cut ? to_.tile_begin(shape[d]) : "0") + "; " + name + " < " +
               (cut ? to_.tile_end(shape[d]) : number(shape[d])) + "; ++" + name + ")");
      ++open_;
    }
  }
  const std::vector<std::string>& names() const { return names_; }
  void close() {
    for (; open_ > 0; --open_) to_.close();
  }

 private:
  FunctionWriter& to_;
  std::vector<std::string> names_;
  int open_ = 0;
};

// Defines `index`, and returns from the task where a dimension of `size` has no such element.
void emit_index(FunctionWriter& to, const std::string& place, int64_t size, bool wrap) {
  to.line("const int64_t given = load_one(" + place + ");");
  to.line("const int64_t index = " +
          (wrap ? "given < 0 ? given + " + number(size) + " : given;" : std::string("given;")));
  to.line("if (!index_fits(context, index, " + number(size) + ", given)) return;");
}

Shape slice(const Shape& shape, size_t from, size_t to) {
  return Shape(shape.begin() + static_cast<int64_t>(from), shape.begin() + static_cast<int64_t>(to));
}

}  // namespace

void emit_matmul(FunctionWriter& to, const MatmulStage& matmul) {
  const Value &a = to.value(matmul.a), &b = to.value(matmul.b), &out = to.value(matmul.out);
  for (const int one : {matmul.a, matmul.b, matmul.out})
    if (!is_floating(to.value(one).type))
      to.refuse("it multiplies matrices of " + std::string(name_of(to.value(one).type)));
  const Shape batch = slice(out.shape, 0, out.shape.size() - 2);
  const auto a_batch = broadcast_strides(a, 2, batch), b_batch = broadcast_strides(b, 2, batch),
             out_batch = broadcast_strides(out, 2, batch);

  using Axis = MatmulStage::Axis;
  std::string r0 = "0", r1 = number(matmul.m), c0 = "0", c1 = number(matmul.n);
  if (matmul.axis == Axis::rows) r0 = to.tile_begin(matmul.m), r1 = to.tile_end(matmul.m);
  if (matmul.axis == Axis::columns) c0 = to.tile_begin(matmul.n), c1 = to.tile_end(matmul.n);

  Nest nest(to, batch, matmul.axis == Axis::batch ? to.axis_of(matmul.out, true) : -1, "b");
  const std::vector<std::string>& indices = nest.names();
  const std::string a_at = at(to.pointer(matmul.a, false), indices, a_batch);
  const std::string b_at = at(to.pointer(matmul.b, false), indices, b_batch);
  const std::string out_at = at(to.pointer(matmul.out, true), indices, out_batch);
  std::string bias_at = "static_cast<const NoBias*>(nullptr)";
  int64_t bias_row = 0, bias_column = 0;
  if (matmul.bias >= 0) {
    const Value& bias = to.value(matmul.bias);
    std::vector<int64_t> bias_batch(batch.size(), 0);
    if (bias.shape.size() > 2) bias_batch = broadcast_strides(bias, 2, batch);
    bias_row = stride_from_end(bias, 2);
    bias_column = stride_from_end(bias, 1);
    bias_at = at(to.pointer(matmul.bias, false), indices, bias_batch);
  }
  // An operand of one row, column or element of depth may have any stride there.
  auto stride = [](const Value& value, size_t from_end, int64_t otherwise) {
    return value.shape[value.shape.size() - from_end] == 1 ? otherwise : value.strides[value.shape.size() - from_end];
  };
  const int64_t a_depth = stride(a, 1, 1), b_depth = stride(b, 2, 1), out_column = stride(out, 1, 1);
  to.line("constexpr Product s{.depth = " + number(matmul.k) + ", .a_row = " + number(stride(a, 2, 0)) +
          ", .a_depth = " + number(a_depth) + ", .b_depth = " + number(b_depth) +
          ", .b_column = " + number(stride(b, 1, 1)) + ",");
  to.line("                    .out_row = " + number(stride(out, 2, 0)) + ", .out_column = " + number(out_column) +
          ", .bias_row = " + number(bias_row) + ", .bias_column = " + number(bias_column) + "};");
  // kRowBlock of matmul.hpp is at most 48 rows.
  const int64_t scratch = to.scratch(std::min<int64_t>(matmul.m, 48) * ((matmul.k + 15) / 16 * 16) * 4);
  to.line("product<" + number(matmul.m) + ">(s, " + a_at + ", " + b_at + ", " + out_at + ", " + bias_at + ", " + r0 +
          ", " + r1 + ", " + c0 + ", " + c1 + ", context.scratch + " + number(scratch) + ");");
  nest.close();
}

void emit_attention(FunctionWriter& to, const AttentionStage& attention) {
  const Value &q = to.value(attention.q), &k = to.value(attention.k), &v = to.value(attention.v),
              &out = to.value(attention.out);
  for (const Value* one : {&q, &k, &v, &out}) {
    if (!is_floating(one->type)) to.refuse("attention over " + std::string(name_of(one->type)));
    if (one->shape.size() != 4) to.refuse("attention over tensors that do not have 4 dimensions");
  }
  const int64_t batch = q.shape[0], kv_heads = k.shape[1], heads = q.shape[1] / kv_heads;
  auto stride = [](const Value& value, size_t d) { return value.shape[d] == 1 ? 0 : value.strides[d]; };
  auto column = [](const Value& value) { return value.shape[3] == 1 ? 1 : value.strides[3]; };
  const int64_t columns = q.shape[3], value_columns = v.shape[3];
  // A row's running result stays in registers, and code is made for each size.
  if (columns > 512 || value_columns > 512)
    to.refuse("attention with heads of " + number(columns) + " and " + number(value_columns) + " numbers");

  Nest nest(to, {batch, kv_heads}, to.axis_of(attention.out, true) == 0 ? 0 : 1, "b");
  const std::vector<std::string>& indices = nest.names();
  auto head_strides = [&](const Value& value, int64_t shared) {
    return std::vector<int64_t>{stride(value, 0), stride(value, 1) * shared};
  };
  const std::string q_at = at(to.pointer(attention.q, false), indices, head_strides(q, heads));
  const std::string k_at = at(to.pointer(attention.k, false), indices, head_strides(k, 1));
  const std::string v_at = at(to.pointer(attention.v, false), indices, head_strides(v, 1));
  const std::string out_at = at(to.pointer(attention.out, true), indices, head_strides(out, heads));
  std::string mask_at = "static_cast<const NoMask*>(nullptr)";
  int64_t mask_head = 0, mask_row = 0, mask_column = 0;
  if (attention.mask >= 0) {
    const Value& mask = to.value(attention.mask);
    mask_head = stride_from_end(mask, 3);
    mask_row = stride_from_end(mask, 2);
    mask_column = stride_from_end(mask, 1);
    mask_at = at(to.pointer(attention.mask, false), indices, {stride_from_end(mask, 4), mask_head * heads});
    if (!is_floating(mask.type) && mask.type != ScalarType::boolean) to.refuse("attention with a mask of integers");
  }
  auto head = [&](const Value& value) { return heads == 1 ? 0 : stride(value, 1); };
  Value scale;
  scale.literal = attention.scale;
  std::string factor = cpp_lanes(scale);  // splat(...)
  factor = factor.substr(6, factor.size() - 7);
  to.line("constexpr Attention s{.heads = " + number(heads) + ", .queries = " + number(q.shape[2]) +
          ", .keys = " + number(k.shape[2]) + ", .q_head = " + number(head(q)) + ", .q_row = " + number(stride(q, 2)) +
          ", .q_column = " + number(column(q)) + ",");
  to.line("                      .k_row = " + number(stride(k, 2)) + ", .k_column = " + number(column(k)) +
          ", .v_row = " + number(stride(v, 2)) + ", .v_column = " + number(column(v)) +
          ", .out_head = " + number(head(out)) + ", .out_row = " + number(stride(out, 2)) + ",");
  to.line("                      .out_column = " + number(column(out)) + ", .mask_head = " + number(mask_head) +
          ", .mask_row = " + number(mask_row) + ", .mask_column = " + number(mask_column) + ", .scale = " + factor +
          ", .causal = " + (attention.causal ? "true" : "false") + "};");
  const int64_t padded = (columns + 15) / 16 * 16, padded_values = (value_columns + 15) / 16 * 16;
  to.scratch((16 * (padded + padded_values) + padded * 64) * 4);  // attention_scratch() of attention.hpp
  to.line("attend<" + number(columns) + ", " + number(value_columns) + ">(context, s, " + q_at + ", " + k_at + ", " +
          v_at + ", " + mask_at + ", " + out_at + ");");
  nest.close();
}

void emit_collective(FunctionWriter& to, const CollectiveStage& collective) {
  const std::string input = to.pointer(collective.input, false), output = to.pointer(collective.output, true);
  to.line("collective(context, " + number(to.stage().node) + ", " + input + ", " + output + ");");
}

void emit_stop(FunctionWriter& to, const StopStage& stop) {
  to.line("if (load_one(" + to.pointer(stop.value, false) + ") != 0) *context.stop = true;");
}

void emit_gather(FunctionWriter& to, const GatherStage& gather) {
  const Value &table = to.value(gather.table), &index = to.value(gather.index), &out = to.value(gather.out);
  if (table.type != out.type) to.refuse("it gathers into another type");
  if (is_floating(index.type) || index.type == ScalarType::boolean) to.refuse("its indices are no integers");
  const size_t dim = static_cast<size_t>(gather.dim), many = index.shape.size();
  Nest nest(to, out.shape.empty() ? Shape{} : slice(out.shape, 0, dim + many), to.axis_of(gather.out, true), "i");
  const std::vector<std::string>& names = nest.names();
  const std::vector<std::string> behind(names.begin() + static_cast<int64_t>(dim), names.end());
  emit_index(to, at(to.pointer(gather.index, false), behind, index.strides), table.shape[dim], gather.wrap);
  // What lies behind the indexed dimension: loops, and a run.
  Shape rest = slice(out.shape, dim + many, out.shape.size());
  const int64_t run = rest.empty() ? 1 : rest.back();
  const int axis = to.axis_of(gather.out, true) - static_cast<int>(dim + many);
  const bool run_cut = !rest.empty() && axis == static_cast<int>(rest.size()) - 1;
  if (!rest.empty()) rest.pop_back();
  Nest inner(to, rest, axis, "j");
  std::vector<std::string> table_indices(names.begin(), names.begin() + static_cast<int64_t>(dim));
  table_indices.push_back("index");
  std::vector<std::string> out_indices = names;
  for (auto* indices : {&table_indices, &out_indices}) {
    indices->insert(indices->end(), inner.names().begin(), inner.names().end());
    if (run_cut) indices->push_back(to.tile_begin(run));
  }
  auto run_stride = [&](const Value& value) {
    return value.shape.size() > 0 && out.shape.size() > dim + many ? value.strides.back() : 1;
  };
  const std::string count = run_cut ? to.tile_end(run) + " - " + to.tile_begin(run) : number(run);
  to.line("copy_run(" + at(to.pointer(gather.out, true), out_indices, out.strides) + ", " + number(run_stride(out)) +
          ", " + at(to.pointer(gather.table, false), table_indices, table.strides) + ", " + number(run_stride(table)) +
          ", " + count + ");");
  inner.close();
  nest.close();
}

void emit_scatter(FunctionWriter& to, const ScatterStage& scatter) {
  const Value &base = to.value(scatter.base), &index = to.value(scatter.index), &source = to.value(scatter.source);
  if (base.type != source.type) to.refuse("it scatters into another type");
  if (is_floating(index.type) || index.type == ScalarType::boolean) to.refuse("its indices are no integers");
  const size_t dim = static_cast<size_t>(scatter.dim);
  const std::vector<int64_t> strides = broadcast_strides(source, 0, source.shape);
  const int axis = to.axis_of(scatter.source, false);
  Nest nest(to, slice(source.shape, 0, dim + 1), axis, "i");
  const std::vector<std::string>& names = nest.names();
  const int64_t step = index.shape.empty() ? 0 : index.strides.back();
  emit_index(to, at(to.pointer(scatter.index, false), {names[dim]}, {step}), base.shape[dim], scatter.wrap);
  Shape rest = slice(source.shape, dim + 1, source.shape.size());
  const int64_t run = rest.empty() ? 1 : rest.back();
  const int inner_axis = axis - static_cast<int>(dim) - 1;
  const bool run_cut = !rest.empty() && inner_axis == static_cast<int>(rest.size()) - 1;
  if (!rest.empty()) rest.pop_back();
  Nest inner(to, rest, inner_axis, "j");
  std::vector<std::string> base_indices(names.begin(), names.end() - 1);
  base_indices.push_back("index");
  std::vector<std::string> source_indices = names;
  for (auto* indices : {&base_indices, &source_indices}) {
    indices->insert(indices->end(), inner.names().begin(), inner.names().end());
    if (run_cut) indices->push_back(to.tile_begin(run));
  }
  auto run_stride = [&](const Value& value) { return source.shape.size() > dim + 1 ? value.strides.back() : 1; };
  const std::string count = run_cut ? to.tile_end(run) + " - " + to.tile_begin(run) : number(run);
  to.line("copy_run(" + at(to.pointer(scatter.base, true), base_indices, base.strides) + ", " +
          number(run_stride(base)) + ", " + at(to.pointer(scatter.source, false), source_indices, strides) + ", " +
          number(run_stride(source)) + ", " + count + ");");
  inner.close();
  nest.close();
}

}  // namespace ark::plan
