// Stages that read or write through indices on a CPU: loops over the indices, a check of each, and copies of the
// contiguous elements behind it.
#include <algorithm>
#include <string>
#include <vector>

#include "compiler/emit/cpu/emit_cpu_loops.hpp"
#include "compiler/emit/cuda/emit_cuda_indexed.hpp"

namespace ark::compiler {

namespace {

std::string length_of_run(const FunctionWriter& to, int64_t run, bool cut) {
  return cut ? formatted("{} - {}", to.tile_end(run), to.tile_begin(run)) : formatted("{}", run);
}

}  // namespace

void emit_gather(FunctionWriter& to, const GatherStage& gather) {
  const Value &table = to.value(gather.table), &out = to.value(gather.out);
  if (table.type != out.type) to.refuse("it gathers into another type");
  for (const int index : gather.indices) check_index(to, to.value(index));
  if (to.cuda()) return emit_cuda_gather(to, gather);
  const size_t dim = static_cast<size_t>(gather.dim);
  const size_t many = gather.along ? out.shape.size() - dim : to.value(gather.indices[0]).shape.size();
  TextNest nest(to, out.shape.empty() ? Shape{} : slice(out.shape, 0, dim + many), to.axis_of(gather.out, true), "i");
  const std::vector<std::string>& names = nest.names();
  const std::vector<std::string> behind(names.begin() + static_cast<int64_t>(gather.along ? 0 : dim), names.end());
  std::vector<std::string> table_indices(names.begin(), names.begin() + static_cast<int64_t>(dim));
  for (size_t i = 0; i < gather.indices.size(); ++i) {
    const Value& index = to.value(gather.indices[i]);
    const std::string place = at(to.pointer(gather.indices[i], false), behind, index.strides);
    table_indices.push_back(emit_index(to, place, table, dim + i, dim, gather.wrap, "return"));
  }
  // The dimensions behind the indexed one: loops, and a contiguous run.
  Shape rest = slice(out.shape, dim + many, out.shape.size());
  const int64_t run = rest.empty() ? 1 : rest.back();
  const int axis = to.axis_of(gather.out, true) - static_cast<int>(dim + many);
  const bool run_cut = !rest.empty() && axis == static_cast<int>(rest.size()) - 1;
  if (!rest.empty()) rest.pop_back();
  TextNest inner(to, rest, axis, "j");
  if (gather.along)
    table_indices.insert(table_indices.end(), names.begin() + static_cast<int64_t>(dim) + 1, names.end());
  std::vector<std::string> out_indices = names;
  for (auto* indices : {&table_indices, &out_indices}) {
    indices->insert(indices->end(), inner.names().begin(), inner.names().end());
    if (run_cut) indices->push_back(to.tile_begin(run));
  }
  auto run_stride = [&](const Value& value) {
    return value.shape.size() > 0 && out.shape.size() > dim + many ? value.strides.back() : 1;
  };
  const std::string table_at = at(to.pointer(gather.table, false), table_indices, table.strides),
                    out_at = at(to.pointer(gather.out, true), out_indices, out.strides);
  to.line("copy_run({}, {}, {}, {}, {});", out_at, run_stride(out), table_at, run_stride(table),
          length_of_run(to, run, run_cut));
  inner.close();
  nest.close();
}

void emit_scatter(FunctionWriter& to, const ScatterStage& scatter) {
  const Value &base = to.value(scatter.base), &index = to.value(scatter.index), &source = to.value(scatter.source);
  if (base.type != source.type) to.refuse("it scatters into another type");
  check_index(to, index);
  if (to.cuda()) return emit_cuda_scatter(to, scatter);
  const size_t dim = static_cast<size_t>(scatter.dim);
  const std::vector<int64_t> strides = broadcast_strides(source, 0, source.shape);
  const int axis = to.axis_of(scatter.source, false);
  const size_t walked = scatter.along ? source.shape.size() : dim + 1;
  TextNest nest(to, slice(source.shape, 0, walked), axis, "i");
  const std::vector<std::string>& names = nest.names();
  const std::string index_at = scatter.along ? at(to.pointer(scatter.index, false), names, index.strides)
                                             : at(to.pointer(scatter.index, false), {names[dim]},
                                                  {index.shape.empty() ? 0 : index.strides.back()});
  const std::string found = emit_index(to, index_at, base, dim, dim, scatter.wrap, "return");
  Shape rest = slice(source.shape, walked, source.shape.size());
  const int64_t run = rest.empty() ? 1 : rest.back();
  const int inner_axis = axis - static_cast<int>(walked);
  const bool run_cut = !rest.empty() && inner_axis == static_cast<int>(rest.size()) - 1;
  if (!rest.empty()) rest.pop_back();
  TextNest inner(to, rest, inner_axis, "j");
  std::vector<std::string> base_indices = names;
  base_indices[dim] = found;
  std::vector<std::string> source_indices = names;
  for (auto* indices : {&base_indices, &source_indices}) {
    indices->insert(indices->end(), inner.names().begin(), inner.names().end());
    if (run_cut) indices->push_back(to.tile_begin(run));
  }
  auto run_stride = [&](const Value& value) { return source.shape.size() > walked ? value.strides.back() : 1; };
  const std::string source_at = at(to.pointer(scatter.source, false), source_indices, strides),
                    base_at = at(to.pointer(scatter.base, true), base_indices, base.strides);
  to.line("{}({}, {}, {}, {}, {});", scatter.accumulate ? "add_run" : "copy_run", base_at, run_stride(base), source_at,
          run_stride(source), length_of_run(to, run, run_cut));
  inner.close();
  nest.close();
}

}  // namespace ark::compiler
