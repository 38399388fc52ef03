// Merges, orders and names the loops of a row program. See emit_cpu_nest.hpp for the rules.
#include "compiler/emit/cpu/emit_cpu_nest.hpp"

#include <algorithm>
#include <functional>
#include <numeric>

namespace ark::compiler {

namespace {

using Instruction = RowProgram::Instruction;
using Kind = Instruction::Kind;

std::string length_of(const RowLoop& loop) {
  return loop.tiled ? formatted("({} - {})", loop.end, loop.begin) : formatted("{}", loop.size);
}

}  // namespace

RowNest::RowNest(FunctionWriter& to, const RowProgram& program) : to_(to), program_(program) {
  look_at_code();
  make_loops();
  choose_vector();
}

bool RowNest::accesses(const Instruction& one) {
  return one.kind == Kind::load || one.kind == Kind::store;
}

int64_t RowNest::stride(const Instruction& one, const RowLoop& loop) {
  return loop.dims.empty() ? 0 : one.strides[static_cast<size_t>(loop.dims.back())];
}

int64_t RowNest::elements() const {
  return std::accumulate(program_.shape.begin(), program_.shape.end(), int64_t{1}, std::multiplies<>());
}

int64_t RowNest::columns() const {
  int64_t all = 1;
  for (const RowLoop& loop : loops_) all *= loop.column ? loop.size : 1;
  return all;
}

void RowNest::look_at_code() {
  for (const Instruction& one : program_.code) {
    reduces_ = reduces_ || one.kind == Kind::reduce;
    numbers_ = numbers_ || (one.scalar && one.kind != Kind::literal);
    positions_ = positions_ || (one.kind == Kind::reduce && one.name == "argmax");
    if (accesses(one) && one.strides.size() != program_.shape.size())
      to_.refuse("a load or store has {} strides for {} dimensions", one.strides.size(), rank());
  }
  // On a GPU a thread computes them for each of its elements: with a warp per row, too few loads would be in flight.
  if (to_.cuda() && !reduces_ && elements() / to_.parts() >= kManyElements) numbers_ = false;
  inner_ = has_numbers() ? program_.inner : rank();
  if (reduces_ && program_.axis >= rank() - inner_) to_.refuse("its tiles cut rows that it reduces");
}

bool RowNest::indexed(int dim) const {
  return std::any_of(program_.code.begin(), program_.code.end(),
                     [&](const Instruction& one) { return one.kind == Kind::index && one.args.at(0) == dim; });
}

// Whether dimension d, of this size and inside the loop, can be merged with the loop.
bool RowNest::continues(const RowLoop& loop, int d, int64_t size, bool column) const {
  if (loop.column != column || d == program_.axis || indexed(d)) return false;
  const int outer = loop.dims.back();
  if (indexed(outer)) return false;
  return std::all_of(program_.code.begin(), program_.code.end(), [&](const Instruction& one) {
    return !accesses(one) || one.strides[static_cast<size_t>(outer)] == one.strides[static_cast<size_t>(d)] * size;
  });
}

void RowNest::make_loops() {
  for (int d = 0; d < rank(); ++d) {
    const int64_t size = program_.shape[static_cast<size_t>(d)];
    if (size == 1 && d != program_.axis && !indexed(d)) continue;
    const bool column = d >= rank() - inner_;
    if (!loops_.empty() && continues(loops_.back(), d, size, column)) {
      RowLoop& loop = loops_.back();
      if (loop.tiled) {
        loop.begin = formatted("({}) * {}", loop.begin, size);
        loop.end = formatted("({}) * {}", loop.end, size);
      }
      loop.size *= size;
      loop.dims.push_back(d);
      continue;
    }
    RowLoop loop;
    loop.size = size;
    loop.column = column;
    loop.dims = {d};
    if (d == program_.axis) {
      loop.tiled = true;
      loop.begin = to_.tile_begin(size);
      loop.end = to_.tile_end(size);
    }
    loops_.push_back(loop);
  }
  for (size_t i = 0; i < loops_.size(); ++i) {
    loops_[i].name = formatted("{}{}", loops_[i].column ? 'c' : 'i', i);
    if (!loops_[i].tiled) loops_[i].end = formatted("{}", loops_[i].size);
  }
}

// Vectorizes the column dimension along which most accesses are contiguous, if the order is free.
void RowNest::choose_vector() {
  int best = -1;
  for (size_t i = 0; i < loops_.size(); ++i) {
    const RowLoop& loop = loops_[i];
    if (!loop.column) continue;
    int adjacent = 0;
    for (const Instruction& one : program_.code)
      if (accesses(one)) adjacent += stride(one, loop) == 1 ? (one.kind == Kind::store ? 3 : 2) : 0;
    if (loop.size < 4) adjacent = 0;
    if (adjacent < best && !positions_) continue;
    best = adjacent;
    vector_ = i;
  }
  if (best == 0 && choose_rows()) return;
  if (best >= 0) return;
  // Rows of one column.
  RowLoop loop;
  loop.column = true;
  loop.name = "c";
  loop.end = "1";
  vector_ = loops_.size();
  loops_.push_back(loop);
}

// If nothing is contiguous along the columns, vectorizes the row dimension along which most accesses are. Each lane
// then sums in the order of columns, whatever the tile.
bool RowNest::choose_rows() {
  constexpr int64_t kFewest = 8;
  if (to_.cuda() || !reduces_ || positions_) return false;
  for (const Instruction& one : program_.code)
    if (one.kind == Kind::store && one.args.size() > 1) return false;  // indexed
  int best = 0;
  for (size_t i = 0; i < loops_.size(); ++i) {
    int adjacent = 0;
    if (loops_[i].column || loops_[i].size < kFewest) continue;
    for (const Instruction& one : program_.code)
      adjacent += one.kind == Kind::load && stride(one, loops_[i]) == 1 ? 1 : 0;
    if (adjacent <= best) continue;
    best = adjacent;
    vector_ = i;
  }
  return best > 0;
}

int64_t RowNest::rows() const {
  int64_t all = 1;
  for (const RowLoop& loop : loops_) all *= loop.column ? 1 : loop.size;
  return all;
}

// Assigns neighboring elements to neighboring threads.
std::vector<const RowLoop*> RowNest::fastest_first(bool columns) const {
  std::vector<const RowLoop*> order;
  if (columns) order.push_back(&vector());
  for (auto loop = loops_.rbegin(); loop != loops_.rend(); ++loop)
    if (loop->column == columns && !(columns && &*loop == &vector())) order.push_back(&*loop);
  return order;
}

std::string RowNest::count(bool columns) const {
  int64_t whole = 1;
  std::string tiled;
  for (const RowLoop& loop : loops_) {
    if (loop.column != columns) continue;
    if (loop.tiled)
      tiled = length_of(loop);
    else
      whole *= loop.size;
  }
  if (tiled.empty()) return formatted("{}", whole);
  return whole == 1 ? tiled : formatted("{} * {}", tiled, whole);
}

int64_t RowNest::columns_of_tiles() const {
  const RowLoop& loop = vector();
  return loop.tiled ? loop.size / program_.shape[static_cast<size_t>(loop.dims.front())] : loop.size;
}

std::vector<int64_t> RowNest::strides_between_lines(const Instruction& one) const {
  std::vector<int64_t> strides;
  for (const RowLoop& loop : loops_)
    if (&loop != &vector() && loop.size > 1) strides.push_back(stride(one, loop));
  return strides;
}

void RowNest::take_apart(const std::string& index, bool columns, int64_t piece) {
  std::vector<const RowLoop*> order = fastest_first(columns);
  int64_t most = 1;
  for (const RowLoop* loop : order) most *= loop->size;
  // A GPU takes ten times as long for a 64-bit division.
  const bool small = most < int64_t{1} << 31;
  const std::string rest = "rest_of_" + index;
  if (order.size() > 1)
    to_.line("{0} {1} = {2};", small ? "uint32_t" : "int64_t", rest,
             small ? formatted("static_cast<uint32_t>({})", index) : index);
  for (size_t i = 0; i < order.size(); ++i) {
    const RowLoop& loop = *order[i];
    const bool in_pieces = piece > 1 && &loop == &vector();
    std::string size = (loop.tiled && small ? "static_cast<uint32_t>" : "") + length_of(loop);
    if (in_pieces) size = loop.tiled ? formatted("({} / {})", size, piece) : formatted("{}", loop.size / piece);
    const bool last = i + 1 == order.size();
    std::string part = order.size() == 1 ? index : last ? rest : formatted("{} % {}", rest, size);
    if (in_pieces) part = formatted("int64_t({}) * {}", part, piece);
    to_.line("[[maybe_unused]] const int64_t {} = {}{};", loop.name, loop.tiled ? loop.begin + " + " : "", part);
    if (!last) to_.line("{} /= {};", rest, size);
  }
}

void RowNest::open(const RowLoop& loop) {
  to_.open("for (int64_t {0} = {1}; {0} < {2}; ++{0})", loop.name, loop.begin, loop.end);
}

std::string RowNest::base(const Instruction& one, bool columns) {
  std::vector<std::string> indices;
  std::vector<int64_t> strides;
  bool tiled = false;
  for (const RowLoop& loop : loops_) {
    if (is_vector(loop) || (loop.column && !columns)) continue;
    indices.push_back(loop.name);
    strides.push_back(stride(one, loop));
    tiled = tiled || loop.tiled;
  }
  std::string offset = cpp_offset(indices, strides);
  const std::string pointer = to_.element_pointer(one.value, one.kind == Kind::store);
  if (const int64_t part = to_.kept_part(one.value); part > 0 && tiled)
    offset = formatted("({} - begin * {})", offset, part);
  return offset == "0" ? pointer : pointer + " + " + offset;
}

std::string RowNest::position(int dim) const {
  for (const RowLoop& loop : loops_)
    if (!loop.dims.empty() && loop.dims[0] == dim)
      return is_vector(loop) ? loop.name + " + kIota" : formatted("splat({})", loop.name);
  return "splat(int64_t{0})";
}

std::string RowNest::flat_column() const {
  std::vector<std::string> indices;
  std::vector<int64_t> strides;
  int64_t step = 1;
  for (auto loop = loops_.rbegin(); loop != loops_.rend(); ++loop) {
    if (!loop->column) continue;
    indices.insert(indices.begin(), loop->name);
    strides.insert(strides.begin(), step);
    step *= loop->size;
  }
  return cpp_offset(indices, strides);
}

std::string RowNest::kept_place() const {
  std::vector<std::string> indices{vector().name};
  std::vector<int64_t> strides{1};
  int64_t step = vector().size;
  for (const RowLoop& loop : loops_) {
    if (!loop.column || is_vector(loop)) continue;
    indices.push_back(loop.name);
    strides.push_back(step);
    step *= loop.size;
  }
  return cpp_offset(indices, strides);
}

}  // namespace ark::compiler
