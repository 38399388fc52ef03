// Row programs as loops over rows and, within a row, over vectors of 16 columns, one pass per level of reductions.
//
// A per-row number is broadcast to all lanes, so that the same functions serve both. If lanes are rows, each lane holds
// its own row's number.
#include <algorithm>
#include <map>

#include "compiler/emit/common/emit_row_program.hpp"
#include "compiler/emit/cpu/emit_cpu_loops.hpp"

namespace ark::compiler {

void RowEmitter::emit() {
  for (const Instruction& one : code_) expressions_.check(one);
  make_levels();
  open_rows();
  for (int level = 0; level <= last_level_; ++level) {
    numbers(level);
    columns(level);
  }
  close_rows();
}

void RowEmitter::open_rows() {
  if (to_.cuda()) return open_threads();
  for (const RowLoop& loop : nest_.loops())
    if (!loop.column && !nest_.is_vector(loop)) nest_.open(loop);
  if (nest_.across_rows()) open_vector();
}

void RowEmitter::open_vector() {
  const RowLoop& vector = nest_.vector();
  to_.open("for_columns({}, {}, [&](int64_t {}, auto lanes) ARK_BODY", vector.begin, vector.end, vector.name);
}

void RowEmitter::close_rows() {
  if (to_.cuda()) {
    if (nest_.has_numbers() || turns_ > 0) to_.close("});");
    return;
  }
  if (nest_.across_rows()) to_.close("});");
  for (const RowLoop& loop : nest_.loops())
    if (!loop.column && !nest_.is_vector(loop)) to_.close();
  if (std::any_of(code_.begin(), code_.end(), [&](const Instruction& one) { return passes_caches(one); }))
    to_.line("end_stores_past();");
}

// Whether, on a CPU, the store bypasses all caches.
bool RowEmitter::passes_caches(const Instruction& one) const {
  if (to_.cuda() || one.kind != Kind::store || one.args.size() > 1 || step(one) != 1) return false;
  const CachePolicy policy = to_.cache_of(one.value, true);
  return policy == CachePolicy::no_allocate || policy == CachePolicy::evict_first;
}

void RowEmitter::define(int i, const std::string& expression) {
  to_.line("const {} {} = {};", lanes_of(at(i).type), RowExpressions::name(i), expression);
}

// The register to store, converted to the lanes of its value's type.
std::string RowEmitter::stored(const Instruction& one) const {
  return expressions_.argument(one.args.at(0), lanes_of(to_.value(one.value).type));
}

// Computes the per-row numbers that are known once the reductions below level `when` are.
void RowEmitter::numbers(int when) {
  if (!nest_.has_numbers()) return;
  for (int i = 0; i < count(); ++i) {
    const Instruction& one = at(i);
    if (level(i) != when) continue;
    if (one.kind == Kind::reduce) {
      std::string result = formatted("s{}.{}()", i, nest_.across_rows() ? "each" : "result");
      if (one.name == "mean") append(result, " / {}.0f", nest_.columns());
      define(i, RowExpressions::rounded(one, result));
    } else if (one.kind == Kind::store && stores_number(one)) {
      if (to_.cuda())
        to_.line("if (Group::rank() == 0) store_one({}, {});", nest_.base(one, false), stored(one));
      else if (nest_.across_rows())
        to_.line("store{}({}, {}, lanes);", form(one), place(one, "", false), stored(one));
      else
        to_.line("store_one({}, one({}));", nest_.base(one, false), stored(one));
    } else if (one.scalar && one.kind == Kind::load) {
      if (nest_.across_rows() && step(one) != 0)
        define(i, formatted("load{}({}, lanes)", form(one), place(one, "", false)));
      else
        define(i, formatted("splat(load_one({}))", nest_.base(one, false)));
    } else if (one.scalar && one.kind == Kind::index) {
      define(i, nest_.position(one.args.at(0)));
    } else if (one.scalar && one.kind == Kind::op) {
      define(i, expressions_.call(one));
    }
  }
}

// Writes one pass over the row's columns.
void RowEmitter::columns(int when) {
  bool any = false;
  Registers need = needed(when, any);
  if (!any) return;
  if (piece_ > 0) return columns_in_pieces(when);
  Registers early = need;
  if (to_.cuda()) load_early(when, early);
  std::set<int> keep = worth_keeping(when, early);
  if (to_.cuda()) load_first(early, keep);
  for (int i = 0; i < count(); ++i)
    if (kept_.count(i) == 0) need[static_cast<size_t>(i)] = early[static_cast<size_t>(i)];
  for (const int i : keep) {
    if (to_.cuda())
      kept_array(i);
    else
      to_.line("float* const k{} = reinterpret_cast<float*>({});", i, to_.scratch_at(to_.scratch(nest_.columns() * 4)));
  }
  for (int i = 0; i < count(); ++i)
    if (need[static_cast<size_t>(i)] && at(i).kind == Kind::reduce) accumulator(i);
  if (to_.cuda()) {
    pass_of_threads(need, keep);
    kept_.insert(keep.begin(), keep.end());
    return;
  }
  for (const RowLoop& loop : nest_.loops())
    if (loop.column && !nest_.is_vector(loop)) nest_.open(loop);
  pass(need, keep);
  for (const RowLoop& loop : nest_.loops())
    if (loop.column && !nest_.is_vector(loop)) to_.close();
  kept_.insert(keep.begin(), keep.end());
}

void RowEmitter::accumulator(int i) {
  const Instruction& one = at(i);
  static const std::map<std::string, const char*> kinds = {{"sum", "Sum"},       {"mean", "Sum"},
                                                           {"amax", "Greatest"}, {"any", "Greatest"},
                                                           {"amin", "Least"},    {"argmax", "WhereGreatest"}};
  const auto kind = kinds.find(one.name);
  if (kind == kinds.end()) to_.refuse("it has no reduction {}", one.name);
  to_.line("{}<{}{}> s{};", kind->second, reduced_lanes(one), to_.cuda() ? ", Group" : "", i);
}

std::string RowEmitter::reduced_lanes(const Instruction& one) const {
  if (one.name == "any") return "Mask";
  if (one.name != "argmax") return lanes_of(one.type);
  const ScalarType type = at(one.args.at(0)).type;
  return type == ScalarType::boolean ? "Ints" : lanes_of(type);
}

// Values that do not vary along the vectorized dimension are loaded before its loop.
void RowEmitter::pass(const Registers& need, const std::set<int>& keep) {
  for (int i = 0; i < count(); ++i)
    if (need[static_cast<size_t>(i)] && kept_.count(i) == 0 && at(i).kind == Kind::load && step(at(i)) == 0)
      define(i, formatted("splat(load_one({}))", nest_.base(at(i), true)));
  if (!nest_.across_rows()) open_vector();
  for (int i = 0; i < count(); ++i)
    if (need[static_cast<size_t>(i)]) column_instruction(i, keep);
  if (!nest_.across_rows()) to_.close("});");
}

// The address of 16 columns, followed by their stride unless they are contiguous.
std::string RowEmitter::place(const Instruction& one, const std::string& further, bool columns) {
  const std::string begin = formatted("{}{} + {}", nest_.base(one, columns), further, nest_.vector().name);
  return step(one) == 1 ? begin : formatted("{0} * {1}, {1}", begin, step(one));
}

// For an indexed store: the condition that the element exists, and its offset.
std::string RowEmitter::fits(const Instruction& one, int i) {
  const std::string index = RowExpressions::name(one.args[1]);
  to_.line("const int64_t given{} = {};", i, to_.cuda() ? index : formatted("one({})", index));
  define_index(to_, static_cast<size_t>(i), one.through.wrap, one.through.size);
  return formatted("if (index_fits(context, index{0}, {1}, given{0}, {2}))", i, one.through.size, one.through.dim);
}

std::string RowEmitter::further(const Instruction& one, int i) {
  return one.args.size() > 1 ? " + " + cpp_offset({formatted("index{}", i)}, {one.through.stride}) : "";
}

void RowEmitter::column_instruction(int i, const std::set<int>& keep) {
  const Instruction& one = at(i);
  if (kept_.count(i) != 0) return define(i, to_.cuda() ? kept_turn(i) : formatted("load({}, lanes)", kept(i)));
  switch (one.kind) {
    case Kind::load:
      if (polled_.count(i) != 0)
        define(i, polled_.at(i));
      else if (to_.cuda())
        define(i, load_element(one));
      else if (step(one) != 0)
        define(i, formatted("load{}({}, lanes)", form(one), place(one)));
      break;
    case Kind::index: define(i, nest_.position(one.args.at(0))); break;
    case Kind::op: define(i, expressions_.call(unrounded_if_stored(i))); break;
    case Kind::reduce: {
      std::string where = one.name == "argmax" ? ", " + nest_.flat_column() : "";
      if (!to_.cuda()) where += std::string(where.empty() ? "" : " + kIota") + ", lanes";
      to_.line("s{}.add({}{});", i, expressions_.argument(one.args.at(0), reduced_lanes(one)), where);
      break;
    }
    case Kind::store:
      if (piece_ > 0 || is_run(one)) {
        to_.line("o{}[{}] = {};", i, piece_ > 0 ? "at" : "turn", stored(one));
        break;
      }
      if (one.args.size() > 1) to_.open(fits(one, i));
      if (to_.cuda())
        to_.line("store_one({}{}, {});", nest_.base(one, true), further(one, i), stored(one));
      else
        to_.line("store{}({}, {}, lanes);", passes_caches(one) ? "_past" : form(one), place(one, further(one, i)),
                 stored(one));
      if (one.args.size() > 1) to_.close();
      break;
    case Kind::literal: break;
  }
  if (keep.count(i) == 0) return;
  if (packed(i))
    to_.line("k{}[turn].set(at, {});", i, RowExpressions::name(i));
  else if (to_.cuda())
    to_.line("{} = {};", kept_turn(i), RowExpressions::name(i));
  else
    to_.line("store({}, {}, lanes);", kept(i), RowExpressions::name(i));
}

void emit(FunctionWriter& to, const RowProgram& program) {
  RowEmitter(to, program).emit();
}

}  // namespace ark::compiler
