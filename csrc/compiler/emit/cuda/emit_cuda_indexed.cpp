// Indexed reads and writes, sorts and running sums for a GPU. Each is one call of the device library
// (cuda/loop/gather.cuh, select.cuh, scan.cuh) with strides as constants and a function that returns the address of a
// part of the tile.
#include "compiler/emit/cuda/emit_cuda_indexed.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "compiler/emit/cpu/emit_cpu_loops.hpp"

namespace ark::compiler {

namespace {

using Texts = std::vector<std::string>;

// The number of a dimension's indices that a tile takes.
std::string tile_length(const FunctionWriter& to, int64_t size) {
  const std::string begin = to.tile_begin(size);
  return formatted("{} - {}", to.tile_end(size),
                   begin.find(' ') == std::string::npos ? begin : formatted("({})", begin));
}

// A tile's indices as one flat number. The cut dimension is the outermost, so that every divisor is a constant.
class FlatSpace {
 public:
  FlatSpace(FunctionWriter& to, const Shape& shape, int axis) : to_(to) {
    int64_t inner = 1;
    names_.assign(shape.size(), "0");
    for (int d = static_cast<int>(shape.size()) - 1; d >= 0; --d) {
      const int64_t size = shape[static_cast<size_t>(d)];
      if (d == axis || size == 1) continue;
      add(d, inner, formatted(" % {}", size));
      inner *= size;
    }
    count_ = formatted("uint32_t({})", inner);
    if (axis >= 0) {
      const int64_t size = shape[static_cast<size_t>(axis)];
      add(axis, inner, " + " + to.tile_begin(size));
      count_ = formatted("uint32_t(({}) * {})", tile_length(to, size), inner);
      inner *= size;
    }
    if (inner >= int64_t{1} << 31) to.refuse("it moves more than 2^31 elements");
  }
  const std::string& count() const { return count_; }
  const Texts& names() const { return names_; }
  // Defines the indices from the flat number with this name.
  void define(const std::string& flat) const {
    for (const auto& [name, rest] : indices_) to_.line("const int64_t {} = {}{};", name, flat, rest);
  }

 private:
  void add(int d, int64_t inner, const std::string& rest) {
    names_[static_cast<size_t>(d)] = formatted("i{}", d);
    indices_.emplace_back(names_[static_cast<size_t>(d)], (inner == 1 ? "" : formatted(" / {}", inner)) + rest);
  }

  FunctionWriter& to_;
  Texts names_;
  std::vector<std::pair<std::string, std::string>> indices_;
  std::string count_;
};

// The last dimension of a copy, from the tile's start in it; one element if that dimension is walked too.
struct CudaRun {
  CudaRun(const FunctionWriter& to, const Shape& shape, size_t walked, int axis)
      : there(shape.size() > walked), cut(there && axis == static_cast<int>(shape.size()) - 1) {
    const int64_t size = there ? shape.back() : 1;
    length = formatted("uint32_t({})", cut ? tile_length(to, size) : formatted("{}", size));
    first = cut ? to.tile_begin(size) : "0";
  }
  // The walked dimensions before it.
  Shape outer(const Shape& shape) const { return slice(shape, 0, shape.size() - (there ? 1 : 0)); }
  int64_t stride(const std::vector<int64_t>& strides) const { return there ? strides.back() : 1; }
  std::string begin(const std::string& pointer, const std::vector<int64_t>& strides) const {
    return at(pointer, {first}, {stride(strides)});
  }
  bool there, cut;
  std::string length, first;
};

// Whether the last dimension is contiguous and all other strides are multiples of 16 bytes.
bool lie_aligned(const Value& value, const std::vector<int64_t>& strides) {
  bool aligned = !strides.empty() && strides.back() == 1;
  for (size_t d = 0; d + 1 < strides.size(); ++d)
    aligned = aligned && (value.shape[d] == 1 || strides[d] * static_cast<int64_t>(size_of(value.type)) % 16 == 0);
  return aligned;
}

// The rows of a stage along `dim`: "to, from, count" and a function that returns each row's address.
class CudaRows {
 public:
  CudaRows(FunctionWriter& to, int input, int out, int dim)
      : to_(to), input_(to.value(input)), out_(to.value(out)), space_(to, lengths(dim), to.axis_of(out, true)) {
    const std::string from_at = to.pointer(input, false), to_at = to.pointer(out, true);
    operands_ = formatted("{}, {}, {}", to_at, from_at, space_.count());
  }
  void call(const std::string& function, const std::string& before) {
    to_.open("{}({}, {}[&](uint32_t row, int64_t& to_at, int64_t& from_at)", function, operands_, before);
    space_.define("row");
    to_.line("to_at = {};", cpp_offset(space_.names(), out_.strides));
    to_.line("from_at = {};", cpp_offset(space_.names(), input_.strides));
    to_.close("});");
  }

 private:
  Shape lengths(int dim) const {
    Shape shape = out_.shape;
    shape[static_cast<size_t>(dim)] = 1;
    return shape;
  }
  FunctionWriter& to_;
  const Value &input_, &out_;
  FlatSpace space_;
  std::string operands_;
};

// Indexed writes, in parallel or in order.
class CudaScatter {
 public:
  CudaScatter(FunctionWriter& to, const ScatterStage& scatter)
      : to_(to),
        scatter_(scatter),
        base_(to.value(scatter.base)),
        index_(to.value(scatter.index)),
        source_(to.value(scatter.source)),
        dim_(static_cast<size_t>(scatter.dim)),
        axis_(to.axis_of(scatter.source, false)),
        strides_(broadcast_strides(source_, 0, source_.shape)),
        base_at_(to.pointer(scatter.base, true)),
        source_at_(to.pointer(scatter.source, false)),
        index_at_(to.pointer(scatter.index, false)) {}

  // Writes all positions in parallel, which requires that no two are the same.
  void side_by_side() {
    const CudaRun run(to_, source_.shape, dim_ + 1, axis_);
    const FlatSpace space(to_, run.outer(source_.shape), run.cut ? -1 : axis_);
    const bool aligned = run.there && lie_aligned(base_, base_.strides) && lie_aligned(source_, strides_);
    to_.open("copy_runs<{}, {}, {}>({}, {}, {}, {}, [&](uint32_t run, int64_t& to_at, int64_t& from_at)",
             run.stride(base_.strides), run.stride(strides_), aligned, run.begin(base_at_, base_.strides),
             run.begin(source_at_, strides_), space.count(), run.length);
    space.define("run");
    places(space.names(), "return false");
    to_.line("return true;");
    to_.close("});");
  }
  // Writes in parallel if positions are strictly increasing; otherwise execution continues after this text.
  void side_by_side_if_growing() {
    to_.open("const auto index_of = [&](int64_t position)");
    to_.line("const int64_t given = load_one({});", at(index_at_, {"position"}, {index_stride()}));
    to_.line("return {}given;", scatter_.wrap ? formatted("given < 0 ? given + {} : ", base_.shape[dim_]) : "");
    to_.close("};");
    to_.open("if (growing({}, index_of))", source_.shape[dim_]);
    side_by_side();
    to_.line("return;");
    to_.close();
  }
  void in_order() {
    Shape columns = source_.shape;
    columns[dim_] = 1;
    const FlatSpace space(to_, columns, axis_);
    to_.open(
        "put_in_order<{}>({}, {}, {}, {}, "
        "[&](uint32_t column, int64_t position, int64_t& to_at, int64_t& from_at) -> int64_t",
        scatter_.accumulate, base_at_, source_at_, space.count(), source_.shape[dim_]);
    space.define("column");
    Texts names = space.names();
    names[dim_] = "position";
    to_.line("return {};", places(names, "return -1"));
    to_.close("});");
  }

 private:
  int64_t index_stride() const { return index_.shape.empty() ? 0 : index_.strides.back(); }
  // Defines the index and the addresses of source and destination. Returns the index.
  std::string places(const Texts& names, const std::string& leave) {
    const std::string place =
        scatter_.along ? at(index_at_, names, index_.strides) : at(index_at_, {names[dim_]}, {index_stride()});
    Texts of_base = names;
    of_base[dim_] = emit_index(to_, place, base_, dim_, dim_, scatter_.wrap, leave);
    to_.line("to_at = {};", cpp_offset(of_base, base_.strides));
    to_.line("from_at = {};", cpp_offset(names, strides_));
    return of_base[dim_];
  }

  FunctionWriter& to_;
  const ScatterStage& scatter_;
  const Value &base_, &index_, &source_;
  const size_t dim_;
  const int axis_;
  const std::vector<int64_t> strides_;
  const std::string base_at_, source_at_, index_at_;
};

}  // namespace

void emit_cuda_gather(FunctionWriter& to, const GatherStage& gather) {
  const Value &table = to.value(gather.table), &out = to.value(gather.out);
  const auto dim = static_cast<size_t>(gather.dim);
  const size_t many = gather.along ? out.shape.size() - dim : to.value(gather.indices[0]).shape.size();
  const int axis = to.axis_of(gather.out, true);
  const CudaRun run(to, out.shape, dim + many, axis);
  const FlatSpace space(to, run.outer(out.shape), run.cut ? -1 : axis);
  const Texts& names = space.names();
  const bool aligned = run.there && lie_aligned(out, out.strides) && lie_aligned(table, table.strides);
  const std::string table_at = run.begin(to.element_pointer(gather.table, false), table.strides),
                    out_at = run.begin(to.element_pointer(gather.out, true), out.strides);
  to.open("copy_runs<{}, {}, {}>({}, {}, {}, {}, [&](uint32_t run, int64_t& to_at, int64_t& from_at)",
          run.stride(out.strides), run.stride(table.strides), aligned, out_at, table_at, space.count(), run.length);
  space.define("run");
  const auto from_dim = static_cast<int64_t>(dim), behind = static_cast<int64_t>(dim + many);
  const Texts of_index(names.begin() + (gather.along ? 0 : from_dim), names.begin() + behind);
  Texts of_table(names.begin(), names.begin() + from_dim);
  for (size_t i = 0; i < gather.indices.size(); ++i) {
    const std::string place = at(to.pointer(gather.indices[i], false), of_index, to.value(gather.indices[i]).strides);
    of_table.push_back(emit_index(to, place, table, dim + i, dim, gather.wrap, "return false"));
  }
  of_table.insert(of_table.end(), names.begin() + (gather.along ? from_dim + 1 : behind), names.end());
  to.line("to_at = {};", cpp_offset(names, out.strides));
  to.line("from_at = {};", cpp_offset(of_table, table.strides));
  to.line("return true;");
  to.close("});");
}

void emit_cuda_scatter(FunctionWriter& to, const ScatterStage& scatter) {
  CudaScatter text(to, scatter);
  if (!scatter.along && !scatter.accumulate) {
    if (to.value(scatter.source).shape[static_cast<size_t>(scatter.dim)] == 1) return text.side_by_side();
    text.side_by_side_if_growing();
  }
  text.in_order();
}

void emit_cuda_select(FunctionWriter& to, const SelectStage& select) {
  const Value &input = to.value(select.input), &out = to.value(select.out);
  const auto dim = static_cast<size_t>(select.dim);
  const int64_t length = input.shape[dim], count = out.shape[dim];
  // The selection of select.cuh uses keys of 8 bytes (16 for 64-bit numbers), in shared memory if they fit.
  constexpr int64_t threads = 512, shared = 96 * 1024, most = 1 << 20;
  const int64_t candidates = count * ((length + threads - 1) / threads);
  const bool by_threshold = length >= 1024 && count <= 256 && candidates * 2 <= length;
  int64_t keys = threads;
  while (keys < (by_threshold ? candidates : length)) keys *= 2;
  const int64_t bytes = keys * (input.type == ScalarType::i64 ? 16 : 8);
  if (bytes > most) to.refuse("it sorts rows of {} numbers", length);
  const int64_t scratch_bytes = bytes > shared ? bytes : 0;
  CudaRows rows(to, select.input, select.out, select.dim);
  rows.call(formatted("select_rows<{}, {}, {}, {}, {}, {}>", select.largest, length, count, out.strides[dim],
                      input.strides[dim], scratch_bytes),
            to.scratch_at(to.scratch(scratch_bytes)) + ", ");
}

void emit_cuda_scan(FunctionWriter& to, const ScanStage& scan) {
  const Value &input = to.value(scan.input), &out = to.value(scan.out);
  const auto dim = static_cast<size_t>(scan.dim);
  CudaRows rows(to, scan.input, scan.out, scan.dim);
  rows.call(formatted("scan_rows<{}, {}, {}, {}>", scan.product, out.shape[dim], out.strides[dim], input.strides[dim]),
            "");
}

}  // namespace ark::compiler
