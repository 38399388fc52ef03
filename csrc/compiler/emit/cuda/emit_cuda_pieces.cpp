// Distributes the rows of a large program over a GPU's threads in pieces: contiguous columns that a thread loads and
// stores in as few instructions as possible (cuda/loop/pieces.cuh). All others: emit_cuda_rows.cpp.
//
// A program is large if each of a GPU's multiprocessors has several pieces per thread, or several rows. Its time is the
// memory's only if enough bytes are in flight, and if an element takes few instructions. So a tile first issues the
// loads of whole rows, or of some pieces per thread, and addresses are computed per piece. A row belongs to as few
// warps as have the registers for it: the fewer, the more rows are in flight. Pieces need lines of elements at
// multiples of 16 bytes. For operands that start elsewhere in their buffer the function has a variant
// (StageFunctions::misaligned) that loads element by element.
#include "compiler/emit/common/emit_row_program.hpp"

#include <algorithm>
#include <numeric>

namespace ark::compiler {

namespace {

constexpr int64_t kMostRegisters = 56;        // of a thread's 128, for what is loaded or kept
constexpr int64_t kUtmostRegisters = 72;      // the same, where a row would otherwise take all of a block
constexpr int64_t kMostColumns = 48;          // of a row per thread
constexpr int64_t kFewColumns = 16;           // the same, if a warp takes no longer for them than several warps do
constexpr int64_t kSeveralRows = 256;         // in most tiles
constexpr int64_t kRowsForWarps = 1024;       // most tiles have a row for half of a block's warps
constexpr int64_t kMostBody = 256;            // unrolled instructions of a program
constexpr int64_t kElementsAPiece = 1 << 16;  // one per thread of a GPU, by number of columns in the piece

}  // namespace

// Whether the instruction is a load or store of each column.
bool RowEmitter::of_columns(int i) const {
  const Instruction& one = at(i);
  return (one.kind == Kind::load && !number(i)) || (one.kind == Kind::store && !stores_number(one));
}

bool RowEmitter::fits_pieces(const Instruction& one) const {
  const Value& value = to_.value(one.value);
  if (one.args.size() > 1 || to_.is_polled(one.value)) return false;
  if (one.kind == Kind::load && step(one) == 0) return one.parts.count == 1;
  if (step(one) != 1 || value.offset * static_cast<int64_t>(size_of(value.type)) % 16 != 0) return false;
  const std::vector<int64_t> strides = nest_.strides_between_lines(one);
  return std::all_of(strides.begin(), strides.end(),
                     [&](int64_t stride) { return stride * static_cast<int64_t>(size_of(value.type)) % 16 == 0; });
}

bool RowEmitter::choose_pieces() {
  const bool rows = nest_.has_numbers();
  if (to_.first_thread() != 0 || nest_.loops().empty() || (rows && !whole_columns())) return false;
  if (rows ? nest_.rows() < kSeveralRows : nest_.elements() < 4 * kElementsAPiece) return false;
  bool narrow = false;
  for (int i = 0; i < count(); ++i) {
    if (at(i).kind != Kind::load && at(i).kind != Kind::store) continue;
    if (to_.is_polled(at(i).value)) return false;
    if (!of_columns(i)) continue;
    if (!fits_pieces(at(i))) return false;
    narrow = narrow || (step(at(i)) == 1 && size_of(to_.value(at(i).value).type) <= 2);
  }
  const int64_t columns = nest_.columns_of_tiles();
  for (piece_ = narrow ? 8 : 4; piece_ >= 4; piece_ /= 2) {
    if (columns % piece_ != 0) continue;
    if (rows ? columns < 32 * piece_ : nest_.elements() < piece_ * kElementsAPiece) continue;
    if (rows && !choose_group()) continue;
    if (!rows) choose_turns();
    return true;
  }
  piece_ = 0;
  return false;
}

// Registers per piece for what instruction i loads or keeps.
int64_t RowEmitter::registers_of(int i) const {
  const Instruction& one = at(i);
  const int64_t wide = one.type == ScalarType::i64 ? 2 : 1;
  if (packed(i)) return piece_ / 2;
  if (one.kind != Kind::load) return piece_ * wide;
  if (step(one) == 0) return wide;
  return (piece_ * one.parts.count * static_cast<int64_t>(size_of(to_.value(one.value).type)) + 3) / 4;
}

int64_t RowEmitter::registers_of_first_loads() const {
  bool any = false;
  int first = 0;
  Registers need = needed(first, any);
  while (!any && first < last_level_) need = needed(++first, any);
  int64_t all = 0;
  for (int i = 0; i < count(); ++i)
    if (need[static_cast<size_t>(i)] && at(i).kind == Kind::load && !number(i)) all += registers_of(i);
  return all;
}

// By the program only: the order of a sum must not depend on the tile.
bool RowEmitter::choose_group() {
  const int64_t pieces = nest_.columns() / piece_, registers = registers_of_first_loads();
  struct Group {
    const char* name;
    int64_t threads, registers;
  };
  for (const auto& [name, threads, most] :
       {Group{"Warp", 32, kMostRegisters}, Group{"Warps2", 64, kMostRegisters}, Group{"Warps4", 128, kMostRegisters},
        Group{"Warps4", 128, kUtmostRegisters}, Group{"Block", 512, kUtmostRegisters}}) {
    const int64_t turns = (pieces + threads - 1) / threads;
    if (turns * piece_ > kMostColumns || turns * registers > most) continue;
    if (threads == 32 && turns * piece_ > kFewColumns && nest_.rows() < kRowsForWarps) continue;
    group_ = name;
    turns_ = static_cast<int>(turns);
    return true;
  }
  return false;
}

// Without reductions: how many pieces of a thread are in flight together.
void RowEmitter::choose_turns() {
  const auto code = static_cast<int64_t>(code_.size());
  for (turns_ = 4; turns_ > 1; turns_ /= 2)
    if (turns_ * registers_of_first_loads() <= kMostRegisters && turns_ * piece_ * code <= kMostBody) return;
}

void RowEmitter::open_pieces() {
  if (!nest_.has_numbers())
    return to_.open("for_blocks<{}>(({}) / {}, [&](int64_t first, int64_t past)", turns_, nest_.count(true), piece_);
  to_.line("using Group = {};", group_);
  to_.open("for_rows<Group>({}, [&]([[maybe_unused]] int64_t row)", nest_.count(false));
  nest_.take_apart("row", false);
}

// The loads that a row's first pass issues: its own, and, as far as registers allow, those of later passes.
std::set<int> RowEmitter::loads_kept(int when) const {
  std::set<int> keep;
  int64_t left = kMostRegisters;
  for (int level = when; level <= last_level_; ++level) {
    bool any = false;
    const Registers need = needed(level, any);
    for (int i = 0; i < count(); ++i) {
      if (!any || !need[static_cast<size_t>(i)] || at(i).kind != Kind::load || number(i) || keep.count(i) != 0)
        continue;
      const int64_t registers = turns_ * registers_of(i);
      if (level > when && registers > left) continue;
      left -= registers;
      keep.insert(i);
    }
  }
  return keep;
}

// Whether the value's pieces can be loaded or stored as such, as a constant in the text.
std::string RowEmitter::aligned_piece(const Instruction& one) {
  return to_.aligned(one.value, nest_.strides_between_lines(one));
}

// Register i of the turn's piece: an element of what was loaded, or what an earlier pass computed.
std::string RowEmitter::kept_in_piece(int i) const {
  const Instruction& one = at(i);
  if (one.kind != Kind::load) return formatted("k{}[turn][at]", i);
  if (step(one) == 0) return formatted("k{}[turn]", i);
  return one.parts.count == 1 ? formatted("k{}[turn][at]", i)
                              : RowExpressions::rounded(one, formatted("k{}[turn][at]", i));
}

// A store rounds anyway.
RowProgram::Instruction RowEmitter::unrounded_if_stored(int i) const {
  Instruction one = at(i);
  if (piece_ == 0 || (one.type != ScalarType::bf16 && one.type != ScalarType::f16)) return one;
  for (const Instruction& user : code_) {
    const bool uses = has_registers(user) && std::count(user.args.begin(), user.args.end(), i) != 0;
    if (uses && (user.kind != Kind::store || to_.value(user.value).type != one.type)) return one;
  }
  one.type = ScalarType::f32;
  return one;
}

// Defines the indices of the turn's first column.
void RowEmitter::open_turn() {
  nest_.take_apart("column", true, nest_.has_numbers() ? 1 : piece_);
}

// Whether a load's pieces stay as loaded.
bool RowEmitter::is_raw(const Instruction& one) const {
  return step(one) == 1 && one.parts.count == 1 && size_of(to_.value(one.value).type) < 4;
}

// Whether a pass keeps register i for later ones as loads are kept.
bool RowEmitter::packed(int i) const {
  const Instruction& one = at(i);
  return piece_ > 0 && one.kind == Kind::op && (one.type == ScalarType::bf16 || one.type == ScalarType::f16);
}

// The packed registers of this pass with which later passes begin: they need neither the loads nor the operators
// before.
std::set<int> RowEmitter::keep_packed(int when, const Registers& need) const {
  std::set<int> keep;
  for (int later = when + 1; later <= last_level_; ++later) {
    bool any = false;
    const Registers again = needed(later, any);
    for (int user = 0; any && user < count(); ++user) {
      const bool begins = again[static_cast<size_t>(user)] && has_registers(at(user)) && kept_.count(user) == 0 &&
                          !(at(user).kind == Kind::op && need[static_cast<size_t>(user)]);
      if (!begins) continue;
      for (const int arg : at(user).args)
        if (need[static_cast<size_t>(arg)] && packed(arg) && kept_.count(arg) == 0) keep.insert(arg);
    }
  }
  return keep;
}

// Declares the loads' arrays, by turn, and writes the loads of one turn after `open`.
void RowEmitter::load_pieces(const std::set<int>& loads, const std::string& open) {
  for (const int i : loads) {
    const Instruction& one = at(i);
    if (!declared_.insert(i).second) continue;
    if (step(one) == 0)
      to_.line("{} k{}[{}];", lanes_of(one.type), i, turns_);
    else if (one.parts.count > 1)
      to_.line("RawPieceOfParts<{}, {}> k{}[{}];", piece_, one.parts.count, i, turns_);
    else
      to_.line("RawPiece<{}, {}> k{}[{}];", cpp_type(to_.value(one.value).type), piece_, i, turns_);
  }
  to_.open("{}[&]([[maybe_unused]] int64_t column, int turn)", open);
  open_turn();
  for (const int i : loads) {
    const Instruction& one = at(i);
    const std::string from = nest_.base(one, true);
    if (step(one) == 0)
      to_.line("k{}[turn] = load_one({});", i, from);
    else if (one.parts.count > 1)
      to_.line("k{}[turn].load<{}>({}, {});", i, aligned_piece(one), from, one.parts.apart);
    else
      to_.line("k{}[turn].load<{}>({});", i, aligned_piece(one), from);
  }
}

void RowEmitter::columns_in_pieces(int when) {
  bool any = false;
  const Registers need = needed(when, any);
  const bool rows = nest_.has_numbers();
  const std::string over = rows ? formatted("<Group, {}, {}>(", piece_, nest_.columns()) : "";
  if (kept_.empty()) {
    const std::set<int> loads = loads_kept(when);
    if (!loads.empty()) {
      load_pieces(loads, rows ? "load_pieces" + over : formatted("load_turns<{}>(first, past, ", turns_));
      to_.close("});");
    }
    kept_.insert(loads.begin(), loads.end());
  } else {
    for (const int i : kept_)
      if (need[static_cast<size_t>(i)] && (packed(i) || (at(i).kind == Kind::load && is_raw(at(i)))))
        to_.line("widen_anew(k{});", i);
  }
  std::set<int> ahead, keep;  // loads of this pass alone; what a later one needs again
  int64_t left = kMostRegisters;
  for (const int i : kept_) left -= turns_ * registers_of(i);
  keep = keep_packed(when, need);
  for (const int i : keep) left -= turns_ * registers_of(i);
  for (const int i : worth_keeping(when, need))
    if (at(i).kind != Kind::load && keep.count(i) == 0 && (left -= turns_ * registers_of(i)) >= 0) keep.insert(i);
  for (int i = 0; i < count(); ++i)
    if (need[static_cast<size_t>(i)] && at(i).kind == Kind::load && !number(i) && kept_.count(i) == 0) ahead.insert(i);
  for (const int i : keep) {
    if (packed(i))
      to_.line("RawPiece<{}, {}> k{}[{}] = {{}};", cpp_type(at(i).type), piece_, i, turns_);
    else
      to_.line("{} k{}[{}][{}] = {{}};", lanes_of(at(i).type), i, turns_, piece_);
  }
  for (int i = 0; i < count(); ++i)
    if (need[static_cast<size_t>(i)] && at(i).kind == Kind::reduce) accumulator(i);
  const std::string body = "[&]([[maybe_unused]] int64_t column, [[maybe_unused]] int turn)";
  if (ahead.empty()) {
    to_.open("{}{}", rows ? "for_pieces" + over : formatted("for_turns<{}>(first, past, ", turns_), body);
  } else {  // never without reductions, where the first pass loads everything
    load_pieces(ahead, "for_pieces" + over);
    to_.close("},");
    to_.open(body);
    kept_.insert(ahead.begin(), ahead.end());
  }
  open_turn();
  std::vector<int> stores;
  for (int i = 0; i < count(); ++i)
    if (need[static_cast<size_t>(i)] && at(i).kind == Kind::store) stores.push_back(i);
  for (const int i : stores) to_.line("{} o{}[{}];", lanes_of(to_.value(at(i).value).type), i, piece_);
  const std::string& column = nest_.vector().name;
  to_.open("for_piece<{0}>({1}, [&]([[maybe_unused]] int64_t {1}, [[maybe_unused]] int at)", piece_, column);
  for (int i = 0; i < count(); ++i)
    if (need[static_cast<size_t>(i)]) column_instruction(i, keep);
  to_.close("});");
  for (const int i : stores) to_.line("store_piece<{}>({}, o{});", aligned_piece(at(i)), nest_.base(at(i), true), i);
  to_.close("});");
  for (const int i : ahead) kept_.erase(i);
  kept_.insert(keep.begin(), keep.end());
}

}  // namespace ark::compiler
