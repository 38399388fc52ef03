// Row programs as loops: over rows, and within a row over columns, 16 at a time, once for each level of reductions.
//
// A register of columns lives inside one pass over the row. One that a later pass needs again is computed again (loads
// come from the cache), but for those that an expensive function made, which are kept in the worker's scratch memory.
// A number of the row is held in all lanes, so that the same functions serve both.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "plan/emit_cpu_function.hpp"

namespace ark::plan {

namespace {

using Instruction = RowProgram::Instruction;
using Kind = Instruction::Kind;

// What an operator takes and gives.
enum class Rule : uint8_t {
  same,     // floats where the result or an operand is one, else as the result
  compare,  // operands as lanes that hold either of them, result a mask
  mask,     // masks
  floats,   // floats, result a mask
  choose,   // a mask, then the result's lanes
  convert,  // cast
  whole,    // as `same`; integers only with a literal as divisor
};
struct RowOp {
  const char* function;
  Rule rule;
};
const std::map<std::string, RowOp>& row_ops() {
  static const std::map<std::string, RowOp> ops = [] {
    std::map<std::string, RowOp> all;
    for (const char* name :
         {"add",   "sub",   "mul",     "div",         "neg",        "abs",         "maximum",    "minimum",
          "relu",  "silu",  "sigmoid", "sign",        "square",     "reciprocal",  "exp",        "exp2",
          "expm1", "log",   "log2",    "log10",       "log1p",      "sqrt",        "rsqrt",      "sin",
          "cos",   "tan",   "asin",    "acos",        "atan",       "atan2",       "sinh",       "cosh",
          "asinh", "acosh", "atanh",   "tanh",        "erf",        "erfc",        "floor",      "ceil",
          "trunc", "round", "pow",     "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"})
      all[name] = {name, Rule::same};
    for (const char* name : {"floor_divide", "remainder", "fmod"}) all[name] = {name, Rule::whole};
    for (const char* name : {"eq", "ne", "lt", "le", "gt", "ge"}) all[name] = {name, Rule::compare};
    for (const char* name : {"isnan", "isinf", "isfinite"}) all[name] = {name, Rule::floats};
    all["logical_and"] = {"bitwise_and", Rule::mask};
    all["logical_or"] = {"bitwise_or", Rule::mask};
    all["logical_xor"] = {"bitwise_xor", Rule::mask};
    all["logical_not"] = {"bitwise_not", Rule::mask};
    all["where"] = {"select", Rule::choose};
    all["cast"] = all["copy"] = {"", Rule::convert};
    return all;
  }();
  return ops;
}
const std::set<std::string>& expensive_ops() {
  static const std::set<std::string> ops = {"exp",  "exp2", "expm1",   "log",   "log2",  "log10",     "log1p",
                                            "sin",  "cos",  "tan",     "asin",  "acos",  "atan",      "atan2",
                                            "sinh", "cosh", "tanh",    "asinh", "acosh", "atanh",     "erf",
                                            "erfc", "pow",  "sigmoid", "silu",  "fmod",  "remainder", "floor_divide"};
  return ops;
}

const char* lanes_of(ScalarType type) {
  return is_floating(type) ? "Floats" : type == ScalarType::boolean ? "Mask" : "Ints";
}
const char* conversion_to(const char* lanes) {
  return lanes[0] == 'F' ? "to_floats" : lanes[0] == 'M' ? "to_mask" : "to_ints";
}

// A dimension of the loop nest: some of the program's, merged where everything steps through them as through one.
struct Loop {
  int64_t size = 1;
  bool column = false;
  bool tiled = false;
  std::vector<int> dims;  // of the program's shape
  std::string name;       // of the index
  std::string begin = "0", end;
};

class RowEmitter {
 public:
  RowEmitter(FunctionWriter& to, const RowProgram& program) : to_(to), program_(program), code_(program.code) {}

  void emit() {
    check();
    make_loops();
    choose_vector();
    make_levels();
    for (const Loop& loop : loops_)
      if (!loop.column && &loop != vector_) open_loop(loop);
    for (int level = 0; level <= last_level_; ++level) {
      numbers(level);
      columns(level);
    }
    for (const Loop& loop : loops_)
      if (!loop.column && &loop != vector_) to_.close();
  }

 private:
  const Instruction& at(int i) const { return code_[static_cast<size_t>(i)]; }
  int count() const { return static_cast<int>(code_.size()); }
  static std::string reg(int i) { return "r" + std::to_string(i); }
  int rank() const { return static_cast<int>(program_.shape.size()); }
  bool accesses(const Instruction& one) const { return one.kind == Kind::load || one.kind == Kind::store; }

  void check() {
    for (const Instruction& one : code_) {
      reduces_ = reduces_ || one.kind == Kind::reduce;
      numbers_ = numbers_ || (one.scalar && one.kind != Kind::literal);
      positions_ = positions_ || (one.kind == Kind::reduce && one.name == "argmax");
      if (accesses(one) && one.strides.size() != program_.shape.size())
        to_.refuse("a load or store has " + std::to_string(one.strides.size()) + " strides for " +
                   std::to_string(rank()) + " dimensions");
      if (one.kind == Kind::op && row_ops().count(one.name) == 0) to_.refuse("it has no operator " + one.name);
    }
    // A row that nothing is reduced over may as well be all there is.
    inner_ = reduces_ || numbers_ ? program_.inner : rank();
    if (reduces_ && program_.axis >= rank() - inner_) to_.refuse("its tiles cut rows that it reduces");
  }

  bool indexed(int dim) const {
    return std::any_of(code_.begin(), code_.end(),
                       [&](const Instruction& one) { return one.kind == Kind::index && one.args.at(0) == dim; });
  }

  // Whether dimension d (of that size, inside the loop) continues what the loop steps through.
  bool continues(const Loop& loop, int d, int64_t size, bool column) const {
    if (loop.column != column || d == program_.axis || indexed(d)) return false;
    const int outer = loop.dims.back();
    if (indexed(outer)) return false;
    return std::all_of(code_.begin(), code_.end(), [&](const Instruction& one) {
      return !accesses(one) || one.strides[static_cast<size_t>(outer)] == one.strides[static_cast<size_t>(d)] * size;
    });
  }

  void make_loops() {
    for (int d = 0; d < rank(); ++d) {
      const int64_t size = program_.shape[static_cast<size_t>(d)];
      if (size == 1 && d != program_.axis && !indexed(d)) continue;
      const bool column = d >= rank() - inner_;
      if (!loops_.empty() && continues(loops_.back(), d, size, column)) {
        Loop& loop = loops_.back();
        if (loop.tiled) {
          loop.begin = "(" + loop.begin + ") * " + std::to_string(size);
          loop.end = "(" + loop.end + ") * " + std::to_string(size);
        }
        loop.size *= size;
        loop.dims.push_back(d);
        continue;
      }
      Loop loop;
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
      loops_[i].name = std::string(loops_[i].column ? "c" : "i") + std::to_string(i);
      if (!loops_[i].tiled) loops_[i].end = std::to_string(loops_[i].size);
    }
  }

  // 16 columns at a time of the dimension along which most accesses are adjacent, where the order is free.
  void choose_vector() {
    Loop* last = nullptr;
    int best = -1;
    for (Loop& loop : loops_) {
      if (!loop.column) continue;
      int adjacent = 0;
      for (const Instruction& one : code_)
        if (accesses(one)) adjacent += stride(one, loop) == 1 ? (one.kind == Kind::store ? 3 : 2) : 0;
      if (loop.size < 4) adjacent = 0;
      last = &loop;
      if (adjacent >= best || positions_) {
        best = adjacent;
        vector_ = &loop;
      }
    }
    if (last != nullptr) return;
    // One column: a loop of one.
    Loop loop;
    loop.column = true;
    loop.name = "c";
    loop.end = "1";
    loops_.push_back(loop);
    vector_ = &loops_.back();
  }

  static int64_t stride(const Instruction& one, const Loop& loop) {
    return loop.dims.empty() ? 0 : one.strides[static_cast<size_t>(loop.dims.back())];
  }

  // A register's level is how many reductions stand before it, one behind the other.
  void make_levels() {
    level_.assign(code_.size(), 0);
    for (int i = 0; i < count(); ++i) {
      const Instruction& one = at(i);
      int level = 0;
      if (one.kind == Kind::op || one.kind == Kind::reduce || one.kind == Kind::store)
        for (const int arg : one.args) level = std::max(level, level_[static_cast<size_t>(arg)]);
      level_[static_cast<size_t>(i)] = level + (one.kind == Kind::reduce ? 1 : 0);
      last_level_ = std::max(last_level_, level_[static_cast<size_t>(i)]);
    }
    // In place: what is read must not have been overwritten when it is read again.
    std::set<int> read;
    for (const Instruction& one : code_)
      if (one.kind == Kind::load) read.insert(to_.value(one.value).buffer);
    for (int i = 0; i < count(); ++i)
      if (at(i).kind == Kind::store && read.count(to_.value(at(i).value).buffer) != 0)
        level_[static_cast<size_t>(i)] = last_level_;
  }

  bool number(int i) const { return at(i).kind == Kind::literal || (numbers_or_reduces() && at(i).scalar); }
  bool numbers_or_reduces() const { return reduces_ || numbers_; }

  void open_loop(const Loop& loop) {
    to_.open("for (int64_t " + loop.name + " = " + loop.begin + "; " + loop.name + " < " + loop.end + "; ++" +
             loop.name + ")");
  }

  // Where instruction `one` begins, over the indices of all loops but the vector's; those of rows alone for a number.
  std::string base(const Instruction& one, bool columns) {
    std::vector<std::string> indices;
    std::vector<int64_t> strides;
    for (const Loop& loop : loops_) {
      if (&loop == vector_ || (loop.column && !columns)) continue;
      indices.push_back(loop.name);
      strides.push_back(stride(one, loop));
    }
    const std::string offset = cpp_offset(indices, strides);
    const std::string pointer = to_.pointer(one.value, one.kind == Kind::store);
    return offset == "0" ? pointer : pointer + " + " + offset;
  }

  std::string lanes_arg(int arg, const char* lanes) {
    const Instruction& one = at(arg);
    const std::string name = one.kind == Kind::literal ? cpp_lanes(literal(one)) : reg(arg);
    const char* have = one.kind == Kind::literal ? lanes_of(literal(one).type) : lanes_of(one.type);
    return std::string(have) == lanes ? name : std::string(conversion_to(lanes)) + "(" + name + ")";
  }
  Value literal(const Instruction& one) const {
    Value value = to_.value(one.value);
    value.type = one.type;
    return value;
  }

  std::string rounded(const Instruction& one, std::string expression) {
    if (one.type == ScalarType::bf16 || one.type == ScalarType::f16 || one.type == ScalarType::i32)
      return "round_to(" + expression + ", " + cpp_type(one.type) + "{})";
    return expression;
  }

  std::string call(const Instruction& one) {
    const RowOp& op = row_ops().at(one.name);
    const char* result = lanes_of(one.type);
    if (op.rule == Rule::convert) return rounded(one, lanes_arg(one.args.at(0), result));
    const char* operands = result;
    if (op.rule == Rule::same || op.rule == Rule::whole) operands = computed_lanes(one);
    if (op.rule == Rule::mask) operands = "Mask";
    if (op.rule == Rule::floats) operands = "Floats";
    if (op.rule == Rule::compare) {
      operands = "Mask";
      for (const int arg : one.args) {
        const char* lanes = lanes_of(at(arg).type);
        if (lanes[0] == 'F' || (lanes[0] == 'I' && operands[0] == 'M')) operands = lanes;
      }
    }
    std::string function = op.function;
    size_t args = one.args.size();
    if (one.name == "pow" && at(one.args.at(1)).kind == Kind::literal) {
      const double power = literal(at(one.args[1])).literal;
      const std::string known = power == 2      ? "square"
                                : power == 3    ? "cube"
                                : power == 0.5  ? "sqrt"
                                : power == -0.5 ? "rsqrt"
                                : power == -1   ? "reciprocal"
                                                : "";
      if (!known.empty() && (operands[0] == 'F' || power > 1)) {
        function = known;
        args = 1;
      }
    }
    if (operands[0] != 'F' && function == "pow") to_.refuse("it raises integers to powers that are not 2 or 3");
    if (op.rule == Rule::whole && operands[0] != 'F') {
      const Instruction& divisor = at(one.args.at(1));
      if (divisor.kind != Kind::literal || literal(divisor).literal == 0)
        to_.refuse("it divides integers by what is not a literal: a division by zero would end the process");
    }
    std::string text = function + "(";
    for (size_t i = 0; i < args; ++i) {
      const char* lanes = op.rule == Rule::choose && i == 0 ? "Mask" : operands;
      text += (i == 0 ? "" : ", ") + lanes_arg(one.args[i], lanes);
    }
    text += ")";
    const char* given = op.rule == Rule::choose                           ? result
                        : op.rule == Rule::same || op.rule == Rule::whole ? operands
                                                                          : "Mask";
    if (std::string(given) != result) text = std::string(conversion_to(result)) + "(" + text + ")";
    return rounded(one, text);
  }

  const char* computed_lanes(const Instruction& one) const {
    for (const int arg : one.args)
      if (is_floating(at(arg).type)) return "Floats";
    if (one.type != ScalarType::boolean) return lanes_of(one.type);
    static const std::set<std::string> on_masks = {"add",         "mul",        "maximum",     "minimum",
                                                   "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"};
    return on_masks.count(one.name) != 0 ? "Mask" : "Ints";
  }

  void define(int i, const std::string& expression) {
    to_.line(std::string("const ") + lanes_of(at(i).type) + " " + reg(i) + " = " + expression + ";");
  }

  // Numbers of the row that are known once the reductions below `level` are.
  void numbers(int level) {
    if (!numbers_or_reduces()) return;
    for (int i = 0; i < count(); ++i) {
      const Instruction& one = at(i);
      if (level_[static_cast<size_t>(i)] != level) continue;
      if (one.kind == Kind::reduce) {
        std::string result = "s" + std::to_string(i) + ".result()";
        if (one.name == "mean") {
          int64_t columns = 1;
          for (const Loop& loop : loops_) columns *= loop.column ? loop.size : 1;
          result += " / " + std::to_string(columns) + ".0f";
        }
        define(i, rounded(one, result));
      } else if (one.kind == Kind::store && is_number(one.args.at(0)) && row_store(one)) {
        const std::string lanes = lanes_of(to_.value(one.value).type);
        to_.line("store_one(" + base(one, false) + ", one(" + lanes_arg(one.args[0], lanes.c_str()) + "));");
      } else if (one.scalar && one.kind == Kind::load) {
        define(i, "splat(load_one(" + base(one, false) + "))");
      } else if (one.scalar && one.kind == Kind::index) {
        define(i, position(one));
      } else if (one.scalar && one.kind == Kind::op) {
        define(i, call(one));
      }
    }
  }

  bool is_number(int i) const { return at(i).kind == Kind::literal || at(i).scalar || at(i).kind == Kind::reduce; }
  // A store of one element a row, not of the same number into all of its columns.
  bool row_store(const Instruction& one) const {
    for (const Loop& loop : loops_)
      if (loop.column && loop.size > 1 && stride(one, loop) != 0) return false;
    return true;
  }

  std::string position(const Instruction& one) {
    for (const Loop& loop : loops_)
      if (!loop.dims.empty() && loop.dims[0] == one.args.at(0))
        return &loop == vector_ ? loop.name + " + kIota" : "splat(" + loop.name + ")";
    return "splat(int64_t{0})";
  }

  // Registers of columns that the pass at `level` must have: what it reduces and stores, and all behind it.
  std::vector<bool> needed(int level, bool& any) {
    std::vector<bool> need(code_.size(), false);
    any = false;
    for (int i = count() - 1; i >= 0; --i) {
      const Instruction& one = at(i);
      const int when = level_[static_cast<size_t>(i)] - (one.kind == Kind::reduce ? 1 : 0);
      const bool sink = (one.kind == Kind::reduce && when == level) ||
                        (one.kind == Kind::store && when == level &&
                         !(numbers_or_reduces() && is_number(one.args.at(0)) && row_store(one)));
      if (sink) need[static_cast<size_t>(i)] = any = true;
      if (!need[static_cast<size_t>(i)] || kept_.count(i) != 0) continue;
      if (one.kind == Kind::op || one.kind == Kind::reduce || one.kind == Kind::store)
        for (const int arg : one.args)
          if (!number(arg) && at(arg).kind != Kind::reduce) need[static_cast<size_t>(arg)] = true;
    }
    return need;
  }

  // Which expensive registers of this pass a later one asks for again.
  std::set<int> worth_keeping(int level, const std::vector<bool>& need) {
    std::set<int> keep;
    for (int later = level + 1; later <= last_level_; ++later) {
      bool any = false;
      const std::vector<bool> again = needed(later, any);
      for (int i = 0; i < count(); ++i)
        if (any && need[static_cast<size_t>(i)] && again[static_cast<size_t>(i)] && kept_.count(i) == 0 &&
            at(i).kind == Kind::op && is_floating(at(i).type) && expensive_ops().count(at(i).name) != 0)
          keep.insert(i);
    }
    return keep;
  }

  std::string flat_column() {
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
  // Kept registers lie with the vector's dimension adjacent.
  std::string kept_place() {
    std::vector<std::string> indices{vector_->name};
    std::vector<int64_t> strides{1};
    int64_t step = vector_->size;
    for (const Loop& loop : loops_) {
      if (!loop.column || &loop == vector_) continue;
      indices.push_back(loop.name);
      strides.push_back(step);
      step *= loop.size;
    }
    return cpp_offset(indices, strides);
  }

  void columns(int level) {
    bool any = false;
    const std::vector<bool> need = needed(level, any);
    if (!any) return;
    const std::set<int> keep = worth_keeping(level, need);
    for (const int i : keep) {
      int64_t elements = 1;
      for (const Loop& loop : loops_) elements *= loop.column ? loop.size : 1;
      to_.line("float* const k" + std::to_string(i) + " = reinterpret_cast<float*>(context.scratch + " +
               std::to_string(to_.scratch(elements * 4)) + ");");
    }
    for (int i = 0; i < count(); ++i)
      if (need[static_cast<size_t>(i)] && at(i).kind == Kind::reduce) accumulator(i);
    for (const Loop& loop : loops_)
      if (loop.column && &loop != vector_) open_loop(loop);
    pass(need, keep);
    for (const Loop& loop : loops_)
      if (loop.column && &loop != vector_) to_.close();
    kept_.insert(keep.begin(), keep.end());
  }

  void accumulator(int i) {
    const Instruction& one = at(i);
    static const std::map<std::string, const char*> kinds = {{"sum", "Sum"},       {"mean", "Sum"},
                                                             {"amax", "Greatest"}, {"any", "Greatest"},
                                                             {"amin", "Least"},    {"argmax", "WhereGreatest"}};
    const auto kind = kinds.find(one.name);
    if (kind == kinds.end()) to_.refuse("it has no reduction " + one.name);
    to_.line(std::string(kind->second) + "<" + reduced_lanes(one) + "> s" + std::to_string(i) + ";");
  }
  const char* reduced_lanes(const Instruction& one) const {
    if (one.name == "any") return "Mask";
    if (one.name == "argmax") {
      const char* lanes = lanes_of(at(one.args.at(0)).type);
      return lanes[0] == 'M' ? "Ints" : lanes;
    }
    return lanes_of(one.type);
  }

  // The loop over columns. Numbers that do not change along it are loaded before.
  void pass(const std::vector<bool>& need, const std::set<int>& keep) {
    for (int i = 0; i < count(); ++i)
      if (need[static_cast<size_t>(i)] && kept_.count(i) == 0 && at(i).kind == Kind::load &&
          stride(at(i), *vector_) == 0)
        define(i, "splat(load_one(" + base(at(i), true) + "))");
    to_.open("for_columns(" + vector_->begin + ", " + vector_->end + ", [&](int64_t " + vector_->name +
             ", auto lanes) ARK_BODY");
    for (int i = 0; i < count(); ++i)
      if (need[static_cast<size_t>(i)]) column_instruction(i, keep);
    to_.close("});");
  }

  void column_instruction(int i, const std::set<int>& keep) {
    const Instruction& one = at(i);
    const std::string& c = vector_->name;
    if (kept_.count(i) != 0) {
      define(i, "load(k" + std::to_string(i) + " + " + kept_place() + ", lanes)");
      return;
    }
    switch (one.kind) {
      case Kind::load: {
        const int64_t step = stride(one, *vector_);
        if (step == 1) define(i, "load(" + base(one, true) + " + " + c + ", lanes)");
        if (step != 0 && step != 1)
          define(i, "load_strided(" + base(one, true) + " + " + c + " * " + std::to_string(step) + ", " +
                        std::to_string(step) + ", lanes)");
        break;
      }
      case Kind::index: define(i, position(one)); break;
      case Kind::op: define(i, call(one)); break;
      case Kind::reduce: {
        const std::string arg = lanes_arg(one.args.at(0), reduced_lanes(one));
        const std::string where = one.name == "argmax" ? ", " + flat_column() + " + kIota" : "";
        to_.line("s" + std::to_string(i) + ".add(" + arg + where + ", lanes);");
        break;
      }
      case Kind::store: {
        const int64_t step = stride(one, *vector_);
        const std::string lanes = lanes_of(to_.value(one.value).type);
        const std::string arg = lanes_arg(one.args.at(0), lanes.c_str());
        if (step == 1)
          to_.line("store(" + base(one, true) + " + " + c + ", " + arg + ", lanes);");
        else
          to_.line("store_strided(" + base(one, true) + " + " + c + " * " + std::to_string(step) + ", " +
                   std::to_string(step) + ", " + arg + ", lanes);");
        break;
      }
      case Kind::literal: break;
    }
    if (keep.count(i) != 0)
      to_.line("store(k" + std::to_string(i) + " + " + kept_place() + ", " + reg(i) + ", lanes);");
  }

  FunctionWriter& to_;
  const RowProgram& program_;
  const std::vector<Instruction>& code_;
  bool reduces_ = false, numbers_ = false, positions_ = false;
  int inner_ = 0;
  std::vector<Loop> loops_;
  Loop* vector_ = nullptr;
  std::vector<int> level_;
  int last_level_ = 0;
  std::set<int> kept_;
};

}  // namespace

void emit_rows(FunctionWriter& to, const RowProgram& program) {
  RowEmitter(to, program).emit();
}

}  // namespace ark::plan
