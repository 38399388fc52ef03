// Sorts, running sums, embedding bags and grouped products: one library call each, shapes and strides as constants.
#include <algorithm>
#include <string>
#include <vector>

#include "compiler/emit/cpu/emit_cpu_loops.hpp"
#include "compiler/emit/cuda/emit_cuda_indexed.hpp"

namespace ark::compiler {

namespace {

int64_t whole_lanes(int64_t count) {
  return (count + 15) / 16 * 16;
}

// Loops over all dimensions but `dim`; pointers to the row's first elements.
struct RowsAlong {
  RowsAlong(FunctionWriter& to, int input, int out, int dim)
      : nest(to, lengths(to.value(out), dim), to.axis_of(out, true), "i"),
        input_at(at(to.pointer(input, false), nest.names(), to.value(input).strides)),
        out_at(at(to.pointer(out, true), nest.names(), to.value(out).strides)) {}

  static Shape lengths(const Value& value, int dim) {
    Shape shape = value.shape;
    shape[static_cast<size_t>(dim)] = 1;
    return shape;
  }
  TextNest nest;
  std::string input_at, out_at;
};

}  // namespace

void emit(FunctionWriter& to, const SelectStage& select) {
  if (to.cuda()) return emit_cuda_select(to, select);
  const Value &input = to.value(select.input), &out = to.value(select.out);
  const auto dim = static_cast<size_t>(select.dim);
  const int64_t scratch = to.scratch(input.shape[dim] * 16);
  RowsAlong rows(to, select.input, select.out, select.dim);
  to.line("select_row<{}, {}>({}, {}, {}, {}, {}, {}, {});", select.largest, select.stable, rows.input_at,
          input.strides[dim], input.shape[dim], rows.out_at, out.strides[dim], out.shape[dim], to.scratch_at(scratch));
  rows.nest.close();
}

void emit(FunctionWriter& to, const ScanStage& scan) {
  const Value &input = to.value(scan.input), &out = to.value(scan.out);
  if (is_floating(input.type) != is_floating(out.type)) to.refuse("it adds up into another kind of numbers");
  if (to.cuda()) return emit_cuda_scan(to, scan);
  const auto dim = static_cast<size_t>(scan.dim);
  RowsAlong rows(to, scan.input, scan.out, scan.dim);
  to.line("scan_row<{}>({}, {}, {}, {}, {});", scan.product, rows.input_at, input.strides[dim], rows.out_at,
          out.strides[dim], out.shape[dim]);
  rows.nest.close();
}

void emit(FunctionWriter& to, const BagStage& bag) {
  const Value &table = to.value(bag.table), &index = to.value(bag.index), &offsets = to.value(bag.offsets),
              &out = to.value(bag.out);
  const int axis = to.axis_of(bag.out, true);
  auto stride = [](const Value& value, size_t d) { return value.shape[d] == 1 ? 1 : value.strides[d]; };
  std::string weights = "static_cast<const NoWeights*>(nullptr)";
  int64_t weight_stride = 0;
  if (bag.weights >= 0) {
    weights = to.pointer(bag.weights, false);
    weight_stride = stride(to.value(bag.weights), 0);
  }
  to.line(
      "constexpr Bags s{{.table_rows = {}, .table_row = {}, .table_column = {}, .indices = {}, .index = {}, .offset = "
      "{},",
      table.shape[0], table.strides[0], stride(table, 1), index.shape[0], index.strides[0], offsets.strides[0]);
  to.line(
      "                 .bags = {}, .last_offset = {}, .weight = {}, .out_row = {}, .out_column = {}, .padding = {}}};",
      out.shape[0], bag.last_offset, weight_stride, out.strides[0], stride(out, 1), bag.padding);
  static constexpr const char* modes[] = {"sum", "mean", "max"};
  const std::string index_at = to.pointer(bag.index, false), offsets_at = to.pointer(bag.offsets, false),
                    table_at = to.element_pointer(bag.table, false), out_at = to.element_pointer(bag.out, true);
  const std::string part = axis == 0   ? formatted("begin, end, 0, {}", out.shape[1])
                           : axis == 1 ? formatted("0, {}, begin, end", out.shape[0])
                                       : formatted("0, {}, begin, {}", out.shape[0], out.shape[1]);
  to.line("pool<Pooling::{}{}>(context, s, {}, {}, {}, {}, {}, {});", modes[static_cast<int>(bag.mode)],
          to.prefetch_text(bag.table), table_at, index_at, offsets_at, weights, out_at, part);
}

void emit(FunctionWriter& to, const CheckStage& check) {
  const std::string out = to.pointer(check.out, true), condition = to.pointer(check.condition, false);
  to.line("check_holds(context, {}, {});", condition, out);
}

void emit(FunctionWriter& to, const ExpertsStage& experts) {
  const Value &a = to.value(experts.a), &table = to.value(experts.table), &index = to.value(experts.index),
              &out = to.value(experts.out);
  const size_t lead = out.shape.size() - 1;
  int64_t rows = 1;
  for (size_t d = 0; d < lead; ++d) rows *= out.shape[d];
  // The offset of row p in a value with these leading dimensions.
  const auto place = [&](const Value& value) {
    std::vector<std::string> indices;
    std::vector<int64_t> strides;
    int64_t inner = rows;
    for (size_t d = 0; d < lead; ++d) {
      const int64_t outer = inner;
      inner /= out.shape[d];
      if (out.shape[d] == 1) continue;
      std::string name = "p";
      if (inner != 1) append(name, " / {}", inner);
      if (outer != rows) append(name, " % {}", out.shape[d]);
      indices.push_back(name);
      strides.push_back(value.strides[d]);
    }
    return formatted("[](int64_t p) {{ return {} + 0 * p; }}", cpp_offset(indices, strides));
  };
  auto stride = [](const Value& value, size_t d) { return value.shape[d] == 1 ? 1 : value.strides[d]; };
  const int64_t depth = table.shape[1];
  std::string aligned;
  if (to.cuda()) {
    std::vector<int64_t> apart;
    for (size_t d = 0; d < lead; ++d)
      if (a.shape[d] != 1) apart.push_back(a.strides[d]);
    const std::string of_table =
        aligned_lines(to, experts.table, {stride(table, 1), stride(table, 2)}, {table.strides[0]});
    const std::string of_a = stride(a, lead) == 1 ? to.aligned(experts.a, apart) : "false";
    aligned = formatted(", .a_aligned = {}, .table_aligned = {}, .table_cache = {}", of_a, of_table,
                        to.cache_text(experts.table));
  }
  to.line("constexpr Experts s{{.rows = {}, .experts = {}, .depth = {}, .a_depth = {}, .table_expert = {},", rows,
          table.shape[0], depth, stride(a, lead), table.strides[0]);
  to.line("                    .table_depth = {}, .table_column = {}, .out_column = {}{}, .runs = {}}};",
          stride(table, 1), stride(table, 2), stride(out, lead), aligned, experts.runs);
  const std::string a_at = to.pointer(experts.a, false), table_at = to.pointer(experts.table, false),
                    index_at = to.pointer(experts.index, false), out_at = to.pointer(experts.out, true);
  const std::string of_index =
      experts.runs ? formatted("[](int64_t e) {{ return e * {}; }}", index.strides[0]) : place(index);
  // Scratch in which grouped_product() sorts rows and packs them.
  if (to.cuda() && table.shape[0] > 16384) to.refuse("it chooses among {} matrices", table.shape[0]);
  const int64_t scratch = to.scratch(to.cuda() ? (table.shape[0] + 1 + rows) * 4
                                               : (table.shape[0] + 1 + rows) * 8 + 64 +
                                                     std::min<int64_t>(rows, 48) * (whole_lanes(depth) + 256) * 4);
  to.line("grouped_product<{}, {}, {}, {}, {}, {},", to.cuda() ? "s>(context" : formatted("{}>(context, s", rows), a_at,
          table_at, index_at, out_at, place(a));
  to.line("                {}, {}, begin, end, {});", of_index, place(out), to.scratch_at(scratch));
}

}  // namespace ark::compiler
