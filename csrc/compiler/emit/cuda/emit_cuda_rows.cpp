// Distributes the rows of a row program over a GPU's threads. Most large programs: emit_cuda_pieces.cpp.
//
// A row belongs to a warp, a group of warps or the block; its columns are spread over the threads, in the same way in
// every pass. If a thread has few columns, the first pass loads what all passes need and keeps it in registers; the
// columns are contiguous, if their number allows, and load in one instruction (cuda/loop/runs.cuh). Register arrays
// start as zeros: unset elements would occupy registers throughout the kernel. Without reductions a tile is one row,
// and a thread takes one or a few elements at a time.
#include "compiler/emit/common/emit_row_program.hpp"

#include <algorithm>
#include <bit>

namespace ark::compiler {

void RowEmitter::open_threads() {
  if (choose_pieces()) return open_pieces();
  if (!nest_.has_numbers()) {
    if (nest_.rows() * nest_.columns() / to_.parts() < RowNest::kManyElements) return;
    turns_ = code_.size() <= (nest_.loops().size() == 1 ? kShortProgram : kShortAmongPlaces) ? 8 : 4;
    return to_.open("for_blocks<{}>({}, [&](int64_t first, int64_t past)", turns_, nest_.count(true));
  }
  // By shape only: the order of a sum must not depend on the tile.
  const bool narrow = nest_.columns() <= 64 || (nest_.columns() <= 32 * kMostTurns && nest_.rows() >= 2048);
  const bool several = nest_.columns() <= 2048 && nest_.rows() >= 256;  // in most tiles
  const int64_t threads = narrow ? 32 : several ? 128 : 512;            // as in cuda/loop/group.cuh
  const int64_t least = (nest_.columns() + threads - 1) / threads;
  const auto whole = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(least)));  // some threads have none then
  const int64_t turns = whole_columns() && nest_.columns() % whole == 0 ? whole : least;
  turns_ = turns <= kMostTurns ? static_cast<int>(turns) : 0;
  in_runs_ = turns_ > 1 && (turns_ & (turns_ - 1)) == 0 && nest_.columns() % turns_ == 0 && whole_columns();
  const std::string warps = to_.parts() > 1           ? formatted("WarpAnew<{}>", to_.first_thread())
                            : to_.first_thread() == 0 ? "Warp"
                                                      : formatted("WarpFrom<{}>", to_.first_thread() / 32);
  to_.line("using Group = {};", narrow ? warps : several ? "Warps4" : "Block");
  to_.open("for_rows<Group>({}, [&]([[maybe_unused]] int64_t row)", nest_.count(false));
  nest_.take_apart("row", false);
}

// Whether there is one column dimension and tiles do not cut it.
bool RowEmitter::whole_columns() const {
  return std::none_of(nest_.loops().begin(), nest_.loops().end(),
                      [&](const RowLoop& loop) { return loop.column && (loop.tiled || &loop != &nest_.vector()); });
}

// Keeps the first ones, as many as a thread has registers for.
void RowEmitter::limit(std::set<int>& keep) const {
  int left = kMostKept;
  for (auto one = keep.begin(); one != keep.end();) {
    left -= turns_ * (at(*one).type == ScalarType::i64 ? 2 : 1);
    one = left < 0 ? keep.erase(one) : std::next(one);
  }
}

// In a GPU's first pass, also needs what later passes load.
void RowEmitter::load_early(int when, Registers& need) const {
  if (turns_ == 0 || !kept_.empty()) return;
  for (int later = when + 1; later <= last_level_; ++later) {
    bool any = false;
    const Registers again = needed(later, any);
    for (int i = 0; i < count(); ++i)
      if (any && again[static_cast<size_t>(i)] && at(i).kind == Kind::load) need[static_cast<size_t>(i)] = true;
  }
}

// No load of a pass sees its stores (stage.hpp), but the compiler cannot know that. If a pass has stores, its loads go
// into a pass of their own before it, so that all of them are in flight together. So do runs.
void RowEmitter::load_first(const Registers& need, std::set<int>& keep) {
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
    const bool run = is_run(at(i)), polled = run && to_.is_polled(at(i).value);
    only[static_cast<size_t>(i)] = !polled;
    others[static_cast<size_t>(i)] = !run;
    if (run && !polled) append(aligned, "{}run_fits<{}>({})", aligned.empty() ? "" : " && ", turns_, run_of(at(i)));
  }
  const auto load_runs = [&](bool polled) {
    for (const int i : loads)
      if (is_run(at(i)) && to_.is_polled(at(i).value) == polled) to_.line(loads_run(i));
  };
  const bool any_other = std::find(others.begin(), others.end(), true) != others.end();
  if (aligned.empty()) {
    if (any_other) pass_of_threads(others, loads);
  } else {  // all runs or none, since a branch per load would wait for each load before the next
    to_.open("if ({})", aligned);
    load_runs(false);
    if (any_other) pass_of_threads(others, loads);
    to_.close();
    to_.open("else");
    to_.line("seldom();");
    seldom_ = true;
    pass_of_threads(only, loads);
    seldom_ = false;
    to_.close();
  }
  load_runs(true);  // polls come last: no load is issued until a poll has ended
  kept_.insert(loads.begin(), loads.end());
  for (const int i : loads) keep.erase(i);
}

// Loads a run into its array, if the run is aligned.
std::string RowEmitter::loads_run(int i) {
  const Instruction& one = at(i);
  if (one.parts.count == 1)
    return formatted("load_run<Group, {}>(k{}, {}, {});", turns_, i, run_of(one), nest_.count(true));
  return formatted("load_run_of_parts<Group, {}, {}>(k{}, {}, {}, {}, [](float sum) {{ return {}; }});", turns_,
                   one.parts.count, i, run_of(one), one.parts.apart, nest_.count(true),
                   RowExpressions::rounded(one, "sum"));
}

// Loads a column's element.
std::string RowEmitter::load_element(const Instruction& one) {
  if (one.parts.count == 1) return formatted("load_one({})", nest_.base(one, true));
  return RowExpressions::rounded(one, formatted("load_parts<{}{}>({}, {})", one.parts.count, seldom_ ? ", false" : "",
                                                nest_.base(one, true), one.parts.apart));
}

void RowEmitter::kept_array(int i) {
  to_.line("{} k{}[{}] = {{}};", lanes_of(at(i).type), i, turns_);
}

void RowEmitter::pass_of_threads(const Registers& need, const std::set<int>& keep) {
  const bool turns = turns_ > 0;
  const std::string from = to_.parts() > 1           ? formatted("_anew<{}>", to_.first_thread())
                           : to_.first_thread() == 0 ? ""
                                                     : formatted("<{}>", to_.first_thread());
  std::string over;
  if (nest_.has_numbers())
    over = turns ? formatted("{}<Group, {}>({}", in_runs_ ? "for_runs" : "for_columns", turns_, nest_.count(true))
                 : formatted("for_columns<Group>({}", nest_.count(true));
  else
    over = turns ? formatted("for_turns<{}>(first, past", turns_)
                 : formatted("for_elements{}({}", from, nest_.count(true));
  std::vector<int> runs;  // stored after the pass
  for (int i = 0; i < count(); ++i)
    if (need[static_cast<size_t>(i)] && at(i).kind == Kind::store && is_run(at(i))) runs.push_back(i);
  for (const int i : runs) to_.line("{} o{}[{}] = {{}};", lanes_of(to_.value(at(i).value).type), i, turns_);
  to_.open("{}, [&]([[maybe_unused]] int64_t column{})", over, turns ? ", [[maybe_unused]] int turn" : "");
  nest_.take_apart("column", true);
  const Registers rest = poll_together(need, keep);
  for (int i = 0; i < count(); ++i)
    if (rest[static_cast<size_t>(i)]) column_instruction(i, keep);
  to_.close("});");
  for (const int i : runs) to_.line("store_run<Group, {}>({}, o{}, {});", turns_, run_of(at(i)), i, nest_.count(true));
}

// If a pass polls packets, writes all its loads here, packets last and polled together. Returns what remains.
RowEmitter::Registers RowEmitter::poll_together(const Registers& need, const std::set<int>& keep) {
  Registers rest = need;
  std::string from;
  polled_.clear();
  for (int i = 0; i < count(); ++i) {
    if (!need[static_cast<size_t>(i)] || kept_.count(i) != 0 || at(i).kind != Kind::load || !to_.is_polled(at(i).value))
      continue;
    polled_.emplace(i, formatted("polled[{}]", polled_.size()));
    from += ", " + nest_.base(at(i), true);
  }
  if (polled_.empty()) return rest;
  for (const bool polled : {false, true}) {
    if (polled) {
      to_.line("Floats polled[{}];", polled_.size());
      to_.line("poll_each(polled{});", from);
    }
    for (int i = 0; i < count(); ++i) {
      if (!need[static_cast<size_t>(i)] || at(i).kind != Kind::load || (polled_.count(i) != 0) != polled) continue;
      column_instruction(i, keep);
      rest[static_cast<size_t>(i)] = false;
    }
  }
  return rest;
}

}  // namespace ark::compiler
