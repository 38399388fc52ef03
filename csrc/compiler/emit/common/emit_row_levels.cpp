// Assigns a level to each register of a row program, and finds the registers that the pass at each level needs.
//
// A column register lives inside one pass over the row. If a later pass needs it too, it is recomputed (its loads hit
// the cache), unless an expensive function made it: then it is kept in the worker's scratch memory or in a thread's
// registers.
#include "compiler/emit/common/emit_row_program.hpp"

#include <algorithm>

namespace ark::compiler {

// A register's level is the longest chain of reductions that it depends on.
void RowEmitter::make_levels() {
  level_.assign(code_.size(), 0);
  for (int i = 0; i < count(); ++i) {
    const Instruction& one = at(i);
    int when = 0;
    if (has_registers(one))
      for (const int arg : one.args) when = std::max(when, level(arg));
    level_[static_cast<size_t>(i)] = when + (one.kind == Kind::reduce ? 1 : 0);
    last_level_ = std::max(last_level_, level(i));
  }
  // In-place stores come last: what they overwrite may be read again in every pass.
  std::set<int> read;
  for (const Instruction& one : code_)
    if (one.kind == Kind::load) read.insert(to_.value(one.value).buffer);
  for (int i = 0; i < count(); ++i)
    if (at(i).kind == Kind::store && read.count(to_.value(at(i).value).buffer) != 0)
      level_[static_cast<size_t>(i)] = last_level_;
}

bool RowEmitter::has_registers(const Instruction& one) {
  return one.kind == Kind::op || one.kind == Kind::reduce || one.kind == Kind::store;
}

// Whether register i is a single number per row and computed as such.
bool RowEmitter::number(int i) const {
  const Instruction& one = at(i);
  return one.kind == Kind::literal || one.kind == Kind::reduce || (nest_.has_numbers() && one.scalar);
}

// Whether the store writes one element per row, and not one number to all of the row's columns.
bool RowEmitter::stores_number(const Instruction& one) const {
  if (!nest_.has_numbers() || !number(one.args.at(0))) return false;
  return std::none_of(nest_.loops().begin(), nest_.loops().end(), [&](const RowLoop& loop) {
    return loop.column && loop.size > 1 && RowNest::stride(one, loop) != 0;
  });
}

// The column registers that the pass at level `when` needs: its reductions and stores, and all they depend on.
RowEmitter::Registers RowEmitter::needed(int when, bool& any) const {
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

// The expensive registers of this pass that a later pass needs again.
std::set<int> RowEmitter::worth_keeping(int when, const Registers& need) const {
  std::set<int> keep;
  if (to_.cuda() && turns_ == 0) return keep;
  if (nest_.across_rows()) return keep;  // one row's columns for every lane exceed the cache
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

}  // namespace ark::compiler
