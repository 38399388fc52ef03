// Row programs as loops: over rows, and within a row over columns, 16 at a time, once for each level of reductions.
//
// A register of columns lives inside one pass over the row. One that a later pass needs again is computed again (loads
// come from the cache), but for those that an expensive function made, which are kept in the worker's scratch memory.
// A number of the row is held in all lanes, so that the same functions serve both.
//
// For a GPU: a row is a warp's or the whole block's, its columns are spread over the threads, each in the same place in
// every pass. Where a thread's columns are few the first pass loads what all of them need, and it stays in registers;
// they are adjacent, if their number allows it, and go in one go (cuda/loop/runs.cuh).
// Where nothing is reduced a tile is one row, of which a thread takes one or a few elements at a time.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "plan/emit_cpu_function.hpp"
#include "plan/emit_cpu_nest.hpp"
#include "plan/emit_cpu_ops.hpp"

namespace ark::plan {

namespace {

using Instruction = RowProgram::Instruction;
using Kind = Instruction::Kind;
using Registers = std::vector<bool>;

std::string row_number(int64_t value) {
  return std::to_string(value);
}

class RowEmitter {
 public:
  RowEmitter(FunctionWriter& to, const RowProgram& program)
      : to_(to), code_(program.code), nest_(to, program), expressions_(to, program) {}

  void emit() {
    for (const Instruction& one : code_) expressions_.check(one);
    make_levels();
    open_rows();
    for (int level = 0; level <= last_level_; ++level) {
      numbers(level);
      columns(level);
    }
    close_rows();
  }

 private:
  const Instruction& at(int i) const { return code_[static_cast<size_t>(i)]; }
  int level(int i) const { return level_[static_cast<size_t>(i)]; }
  int count() const { return static_cast<int>(code_.size()); }

  void open_rows() {
    if (!to_.cuda()) {
      for (const RowLoop& loop : nest_.loops())
        if (!loop.column) nest_.open(loop);
      return;
    }
    if (!nest_.has_numbers()) {
      if (nest_.rows() * nest_.columns() < kManyElements) return;
      turns_ = code_.size() <= kShortProgram ? 8 : 4;
      return to_.open("for_blocks<" + row_number(turns_) + ">(" + nest_.count(true) +
                      ", [&](int64_t first, int64_t past)");
    }
    // By shape alone: the order of a sum must not depend on the tile.
    const bool narrow = nest_.columns() <= 64 || (nest_.columns() <= 1024 && nest_.rows() >= 2048);
    const bool several = nest_.columns() <= 1024 && nest_.rows() >= 256;  // of a tile, most likely
    const int64_t threads = narrow ? 32 : several ? 128 : 512;            // of cuda/loop/group.cuh
    const int64_t turns = (nest_.columns() + threads - 1) / threads;
    turns_ = turns <= kMostTurns ? static_cast<int>(turns) : 0;
    in_runs_ = turns_ > 1 && (turns_ & (turns_ - 1)) == 0 && nest_.columns() % turns_ == 0 && whole_columns();
    to_.line(std::string("using Group = ") + (narrow ? "Warp" : several ? "Warps4" : "Block") + ";");
    to_.open("for_rows<Group>(" + nest_.count(false) + ", [&]([[maybe_unused]] int64_t row)");
    nest_.take_apart("row", false);
  }
  // One dimension, that tiles do not cut.
  bool whole_columns() const {
    return std::none_of(nest_.loops().begin(), nest_.loops().end(),
                        [&](const RowLoop& loop) { return loop.column && (loop.tiled || &loop != &nest_.vector()); });
  }
  // Of a GPU: whether a thread's columns are adjacent in what is loaded or stored, which then goes in one go.
  bool is_run(const Instruction& one) const { return in_runs_ && one.args.size() < 2 && step(one) == 1; }
  std::string run_of(const Instruction& one) { return nest_.base(one, false); }
  void close_rows() {
    if (to_.cuda()) {
      if (nest_.has_numbers() || turns_ > 0) to_.close("});");
      return;
    }
    for (const RowLoop& loop : nest_.loops())
      if (!loop.column) to_.close();
  }

  // A register's level is how many reductions stand before it, one behind the other.
  void make_levels() {
    level_.assign(code_.size(), 0);
    for (int i = 0; i < count(); ++i) {
      const Instruction& one = at(i);
      int when = 0;
      if (has_registers(one))
        for (const int arg : one.args) when = std::max(when, level(arg));
      level_[static_cast<size_t>(i)] = when + (one.kind == Kind::reduce ? 1 : 0);
      last_level_ = std::max(last_level_, level(i));
    }
    // In place: what is read must not have been overwritten when it is read again.
    std::set<int> read;
    for (const Instruction& one : code_)
      if (one.kind == Kind::load) read.insert(to_.value(one.value).buffer);
    for (int i = 0; i < count(); ++i)
      if (at(i).kind == Kind::store && read.count(to_.value(at(i).value).buffer) != 0)
        level_[static_cast<size_t>(i)] = last_level_;
  }

  static bool has_registers(const Instruction& one) {
    return one.kind == Kind::op || one.kind == Kind::reduce || one.kind == Kind::store;
  }
  // Whether register i is one number a row, and computed as such.
  bool number(int i) const {
    const Instruction& one = at(i);
    return one.kind == Kind::literal || one.kind == Kind::reduce || (nest_.has_numbers() && one.scalar);
  }
  // A store of one element a row, not of the same number into all of its columns.
  bool stores_number(const Instruction& one) const {
    if (!nest_.has_numbers() || !number(one.args.at(0))) return false;
    return std::none_of(nest_.loops().begin(), nest_.loops().end(), [&](const RowLoop& loop) {
      return loop.column && loop.size > 1 && RowNest::stride(one, loop) != 0;
    });
  }

  void define(int i, const std::string& expression) {
    to_.line(std::string("const ") + lanes_of(at(i).type) + " " + RowExpressions::name(i) + " = " + expression + ";");
  }
  // The register that a store takes, as its value's type is held.
  std::string stored(const Instruction& one) const {
    return expressions_.argument(one.args.at(0), lanes_of(to_.value(one.value).type));
  }

  // Numbers of the row that are known once the reductions below `when` are.
  void numbers(int when) {
    if (!nest_.has_numbers()) return;
    for (int i = 0; i < count(); ++i) {
      const Instruction& one = at(i);
      if (level(i) != when) continue;
      if (one.kind == Kind::reduce) {
        std::string result = "s" + row_number(i) + ".result()";
        if (one.name == "mean") result += " / " + row_number(nest_.columns()) + ".0f";
        define(i, RowExpressions::rounded(one, result));
      } else if (one.kind == Kind::store && stores_number(one)) {
        if (to_.cuda())
          to_.line("if (Group::rank() == 0) store_one(" + nest_.base(one, false) + ", " + stored(one) + ");");
        else
          to_.line("store_one(" + nest_.base(one, false) + ", one(" + stored(one) + "));");
      } else if (one.scalar && one.kind == Kind::load) {
        define(i, "splat(load_one(" + nest_.base(one, false) + "))");
      } else if (one.scalar && one.kind == Kind::index) {
        define(i, nest_.position(one.args.at(0)));
      } else if (one.scalar && one.kind == Kind::op) {
        define(i, expressions_.call(one));
      }
    }
  }

  // Registers of columns that the pass at level `when` must have: what it reduces and stores, and all behind it.
  Registers needed(int when, bool& any) const {
    Registers need(code_.size(), false);
    any = false;
    for (int i = count() - 1; i >= 0; --i) {
      const Instruction& one = at(i);
      const bool sink = (one.kind == Kind::reduce && level(i) - 1 == when) ||
                        (one.kind == Kind::store && level(i) == when && !stores_number(one));
      if (sink) need[static_cast<size_t>(i)] = any = true;
      if (!need[static_cast<size_t>(i)] || kept_.count(i) != 0 || !has_registers(one)) continue;
      for (const int arg : one.args)
        if (!number(arg)) need[static_cast<size_t>(arg)] = true;
    }
    return need;
  }

  // Which expensive registers of this pass a later one asks for again.
  std::set<int> worth_keeping(int when, const Registers& need) const {
    std::set<int> keep;
    if (to_.cuda() && turns_ == 0) return keep;
    for (int later = when + 1; later <= last_level_; ++later) {
      bool any = false;
      const Registers again = needed(later, any);
      for (int i = 0; i < count(); ++i)
        if (any && need[static_cast<size_t>(i)] && again[static_cast<size_t>(i)] && kept_.count(i) == 0 &&
            (RowExpressions::expensive(at(i)) || (to_.cuda() && at(i).kind == Kind::load)))
          keep.insert(i);
    }
    if (to_.cuda()) limit(keep);
    return keep;
  }

  // As many as a thread has registers for, the first ones.
  void limit(std::set<int>& keep) const {
    int left = kMostKept;
    for (auto one = keep.begin(); one != keep.end();) {
      left -= turns_ * (at(*one).type == ScalarType::i64 ? 2 : 1);
      one = left < 0 ? keep.erase(one) : std::next(one);
    }
  }

  // Of a GPU's first pass: also what later ones load.
  void load_early(int when, Registers& need) const {
    if (turns_ == 0 || !kept_.empty()) return;
    for (int later = when + 1; later <= last_level_; ++later) {
      bool any = false;
      const Registers again = needed(later, any);
      for (int i = 0; i < count(); ++i)
        if (any && again[static_cast<size_t>(i)] && at(i).kind == Kind::load) need[static_cast<size_t>(i)] = true;
    }
  }

  // What a pass of a GPU's threads stores no load of it sees (stage.hpp), but the compiler has to think so: where there
  // are stores, loads stand in a pass of their own before it, so that all of them are under way together. So do runs.
  void load_first(const Registers& need, std::set<int>& keep) {
    const auto in_pass = [&](int i, Kind kind) { return need[static_cast<size_t>(i)] && at(i).kind == kind; };
    bool stores = in_runs_;
    for (int i = 0; i < count(); ++i) stores = stores || in_pass(i, Kind::store);
    if (!stores || turns_ == 0 || !kept_.empty()) return;
    for (int i = 0; i < count(); ++i)
      if (in_pass(i, Kind::load) && !number(i)) keep.insert(i);
    limit(keep);
    std::set<int> loads;
    for (const int i : keep)
      if (at(i).kind == Kind::load) loads.insert(i);
    if (loads.empty()) return;
    for (const int i : loads) kept_array(i);
    Registers only(code_.size(), false), others = only;
    std::string aligned;
    for (const int i : loads) {
      only[static_cast<size_t>(i)] = true;
      others[static_cast<size_t>(i)] = !is_run(at(i));
      if (is_run(at(i)))
        aligned += (aligned.empty() ? "" : " && ") + ("run_fits<" + row_number(turns_)) + ">(" + run_of(at(i)) + ")";
    }
    if (aligned.empty()) {
      pass_of_threads(only, loads);
    } else {  // of one kind or the other, or each load would be waited for before the next
      to_.open("if (" + aligned + ")");
      for (const int i : loads)
        if (is_run(at(i))) to_.line(loads_run(i));
      if (std::find(others.begin(), others.end(), true) != others.end()) pass_of_threads(others, loads);
      to_.close();
      to_.open("else");
      to_.line("seldom();");
      seldom_ = true;
      pass_of_threads(only, loads);
      seldom_ = false;
      to_.close();
    }
    kept_.insert(loads.begin(), loads.end());
    for (const int i : loads) keep.erase(i);
  }
  // Of a load whose run fits, into its array.
  std::string loads_run(int i) {
    const Instruction& one = at(i);
    const std::string into = "(k" + row_number(i) + ", " + run_of(one);
    if (one.parts.count == 1)
      return "load_run<Group, " + row_number(turns_) + ">" + into + ", " + nest_.count(true) + ");";
    return "load_run_of_parts<Group, " + row_number(turns_) + ", " + row_number(one.parts.count) + ">" + into + ", " +
           row_number(one.parts.apart) + ", " + nest_.count(true) + ", [](float sum) { return " +
           RowExpressions::rounded(one, "sum") + "; });";
  }
  // A column's element.
  std::string load_element(const Instruction& one) {
    if (one.parts.count == 1) return "load_one(" + nest_.base(one, true) + ")";
    return RowExpressions::rounded(one, "load_parts<" + row_number(one.parts.count) + (seldom_ ? ", false" : "") +
                                            ">(" + nest_.base(one, true) + ", " + row_number(one.parts.apart) + ")");
  }
  void kept_array(int i) {
    to_.line(std::string(lanes_of(at(i).type)) + " k" + row_number(i) + "[" + row_number(turns_) + "];");
  }

  std::string kept_turn(int i) const { return "k" + row_number(i) + "[turn]"; }
  std::string kept(int i) const { return "k" + row_number(i) + " + " + nest_.kept_place(); }

  // One pass over the row's columns.
  void columns(int when) {
    bool any = false;
    Registers need = needed(when, any);
    if (!any) return;
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
        to_.line("float* const k" + row_number(i) + " = reinterpret_cast<float*>(context.scratch + " +
                 row_number(to_.scratch(nest_.columns() * 4)) + ");");
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

  void accumulator(int i) {
    const Instruction& one = at(i);
    static const std::map<std::string, const char*> kinds = {{"sum", "Sum"},       {"mean", "Sum"},
                                                             {"amax", "Greatest"}, {"any", "Greatest"},
                                                             {"amin", "Least"},    {"argmax", "WhereGreatest"}};
    const auto kind = kinds.find(one.name);
    if (kind == kinds.end()) to_.refuse("it has no reduction " + one.name);
    to_.line(std::string(kind->second) + "<" + reduced_lanes(one) + (to_.cuda() ? ", Group> s" : "> s") +
             row_number(i) + ";");
  }
  std::string reduced_lanes(const Instruction& one) const {
    if (one.name == "any") return "Mask";
    if (one.name != "argmax") return lanes_of(one.type);
    const ScalarType type = at(one.args.at(0)).type;
    return type == ScalarType::boolean ? "Ints" : lanes_of(type);
  }

  // Numbers that do not change along the vector's dimension are loaded before its loop.
  void pass(const Registers& need, const std::set<int>& keep) {
    for (int i = 0; i < count(); ++i)
      if (need[static_cast<size_t>(i)] && kept_.count(i) == 0 && at(i).kind == Kind::load && step(at(i)) == 0)
        define(i, "splat(load_one(" + nest_.base(at(i), true) + "))");
    const RowLoop& vector = nest_.vector();
    to_.open("for_columns(" + vector.begin + ", " + vector.end + ", [&](int64_t " + vector.name +
             ", auto lanes) ARK_BODY");
    for (int i = 0; i < count(); ++i)
      if (need[static_cast<size_t>(i)]) column_instruction(i, keep);
    to_.close("});");
  }

  void pass_of_threads(const Registers& need, const std::set<int>& keep) {
    const bool turns = turns_ > 0;
    const std::string many = "<" + row_number(turns_) + ">(first, past";
    const std::string by_columns = in_runs_ ? "for_runs" : "for_columns";
    const std::string over = !nest_.has_numbers() ? (turns ? "for_turns" + many : "for_elements(" + nest_.count(true))
                             : turns ? by_columns + "<Group, " + row_number(turns_) + ">(" + nest_.count(true)
                                     : "for_columns<Group>(" + nest_.count(true);
    std::vector<int> runs;  // stored behind the pass
    for (int i = 0; i < count(); ++i)
      if (need[static_cast<size_t>(i)] && at(i).kind == Kind::store && is_run(at(i))) runs.push_back(i);
    for (const int i : runs)
      to_.line(std::string(lanes_of(to_.value(at(i).value).type)) + " o" + row_number(i) + "[" + row_number(turns_) +
               "];");
    to_.open(over + ", [&]([[maybe_unused]] int64_t column" + (turns ? ", [[maybe_unused]] int turn)" : ")"));
    nest_.take_apart("column", true);
    for (int i = 0; i < count(); ++i)
      if (need[static_cast<size_t>(i)]) column_instruction(i, keep);
    to_.close("});");
    for (const int i : runs)
      to_.line("store_run<Group, " + row_number(turns_) + ">(" + run_of(at(i)) + ", o" + row_number(i) + ", " +
               nest_.count(true) + ");");
  }

  int64_t step(const Instruction& one) const { return RowNest::stride(one, nest_.vector()); }
  // Where 16 columns lie, and behind it how far apart they are, unless adjacent.
  std::string place(const Instruction& one, const std::string& further = "") {
    const std::string begin = nest_.base(one, true) + further + " + " + nest_.vector().name;
    return step(one) == 1 ? begin : begin + " * " + row_number(step(one)) + ", " + row_number(step(one));
  }
  const char* form(const Instruction& one) const { return step(one) == 1 ? "(" : "_strided("; }

  // Of a store through an index: what opens it where there is such an element, and how much further that is.
  std::string fits(const Instruction& one, int i) {
    const std::string given = "given" + row_number(i), size = row_number(one.through.size);
    const std::string index = RowExpressions::name(one.args[1]);
    to_.line("const int64_t " + given + " = " + (to_.cuda() ? index : "one(" + index + ")") + ";");
    to_.line("const int64_t index" + row_number(i) + " = " +
             (one.through.wrap ? given + " < 0 ? " + given + " + " + size + " : " : "") + given + ";");
    return "if (index_fits(context, index" + row_number(i) + ", " + size + ", " + given + ", " +
           row_number(one.through.dim) + "))";
  }
  static std::string further(const Instruction& one, int i) {
    return one.args.size() > 1 ? " + " + cpp_offset({"index" + row_number(i)}, {one.through.stride}) : "";
  }

  void column_instruction(int i, const std::set<int>& keep) {
    const Instruction& one = at(i);
    if (kept_.count(i) != 0) return define(i, to_.cuda() ? kept_turn(i) : "load(" + kept(i) + ", lanes)");
    switch (one.kind) {
      case Kind::load:
        if (to_.cuda())
          define(i, load_element(one));
        else if (step(one) != 0)
          define(i, std::string("load") + form(one) + place(one) + ", lanes)");
        break;
      case Kind::index: define(i, nest_.position(one.args.at(0))); break;
      case Kind::op: define(i, expressions_.call(one)); break;
      case Kind::reduce: {
        std::string where = one.name == "argmax" ? ", " + nest_.flat_column() : "";
        if (!to_.cuda()) where += std::string(where.empty() ? "" : " + kIota") + ", lanes";
        to_.line("s" + row_number(i) + ".add(" + expressions_.argument(one.args.at(0), reduced_lanes(one)) + where +
                 ");");
        break;
      }
      case Kind::store:
        if (is_run(one)) {
          to_.line("o" + row_number(i) + "[turn] = " + stored(one) + ";");
          break;
        }
        if (one.args.size() > 1) to_.open(fits(one, i));
        if (to_.cuda())
          to_.line("store_one(" + nest_.base(one, true) + further(one, i) + ", " + stored(one) + ");");
        else
          to_.line(std::string("store") + form(one) + place(one, further(one, i)) + ", " + stored(one) + ", lanes);");
        if (one.args.size() > 1) to_.close();
        break;
      case Kind::literal: break;
    }
    if (keep.count(i) == 0) return;
    if (to_.cuda())
      to_.line(kept_turn(i) + " = " + RowExpressions::name(i) + ";");
    else
      to_.line("store(" + kept(i) + ", " + RowExpressions::name(i) + ", lanes);");
  }

  FunctionWriter& to_;
  const std::vector<Instruction>& code_;
  RowNest nest_;
  const RowExpressions expressions_;
  static constexpr int kMostTurns = 8, kMostKept = 32;  // columns and registers of a thread
  static constexpr size_t kShortProgram = 12;           // that may stand eight times in a text
  static constexpr int64_t kManyElements = 1 << 17;     // so many that tiles have more than there are threads
  std::vector<int> level_;
  int last_level_ = 0;
  int turns_ = 0;         // of a GPU: columns a thread, where they are few
  bool in_runs_ = false;  // and adjacent
  bool seldom_ = false;   // in a branch that shall not need many registers
  std::set<int> kept_;
};

}  // namespace

void emit_rows(FunctionWriter& to, const RowProgram& program) {
  RowEmitter(to, program).emit();
}

}  // namespace ark::plan
