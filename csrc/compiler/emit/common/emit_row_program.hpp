// Generates the code of a row program, for both targets.
//
// emit_row_levels.cpp computes levels and what each pass over a row needs. emit_cpu_rows.cpp has the code that both
// targets share and the CPU's. emit_cuda_rows.cpp distributes rows over a GPU's threads, and emit_cuda_pieces.cpp
// those of large programs.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "compiler/emit/cpu/emit_cpu_function.hpp"
#include "compiler/emit/cpu/emit_cpu_nest.hpp"
#include "compiler/emit/cpu/emit_cpu_ops.hpp"

namespace ark::compiler {

class RowEmitter {
 public:
  RowEmitter(FunctionWriter& to, const RowProgram& program)
      : to_(to), code_(program.code), nest_(to, program), expressions_(to, program) {}

  void emit();

 private:
  using Instruction = RowProgram::Instruction;
  using Kind = Instruction::Kind;
  using Registers = std::vector<bool>;

  const Instruction& at(int i) const { return code_[static_cast<size_t>(i)]; }
  int level(int i) const { return level_[static_cast<size_t>(i)]; }
  int count() const { return static_cast<int>(code_.size()); }

  // emit_row_levels.cpp.
  void make_levels();
  static bool has_registers(const Instruction& one);
  bool number(int i) const;
  bool stores_number(const Instruction& one) const;
  Registers needed(int when, bool& any) const;
  std::set<int> worth_keeping(int when, const Registers& need) const;

  // emit_cpu_rows.cpp.
  void open_rows();
  void open_vector();
  void close_rows();
  void define(int i, const std::string& expression);
  std::string stored(const Instruction& one) const;
  void numbers(int when);
  void columns(int when);
  void accumulator(int i);
  std::string reduced_lanes(const Instruction& one) const;
  void pass(const Registers& need, const std::set<int>& keep);
  std::string place(const Instruction& one, const std::string& further = "", bool columns = true);
  bool passes_caches(const Instruction& one) const;
  std::string fits(const Instruction& one, int i);
  static std::string further(const Instruction& one, int i);
  void column_instruction(int i, const std::set<int>& keep);
  int64_t step(const Instruction& one) const { return RowNest::stride(one, nest_.vector()); }
  const char* form(const Instruction& one) const { return step(one) == 1 ? "" : "_strided"; }
  std::string kept_turn(int i) const { return piece_ > 0 ? kept_in_piece(i) : formatted("k{}[turn]", i); }
  std::string kept(int i) const { return formatted("k{} + {}", i, nest_.kept_place()); }

  // emit_cuda_rows.cpp.
  void open_threads();
  bool whole_columns() const;
  // Whether a thread's columns are contiguous in the value, and thus loaded or stored in one instruction.
  bool is_run(const Instruction& one) const { return in_runs_ && one.args.size() < 2 && step(one) == 1; }
  std::string run_of(const Instruction& one) { return nest_.base(one, false); }
  void limit(std::set<int>& keep) const;
  void load_early(int when, Registers& need) const;
  void load_first(const Registers& need, std::set<int>& keep);
  std::string loads_run(int i);
  std::string load_element(const Instruction& one);
  void kept_array(int i);
  void pass_of_threads(const Registers& need, const std::set<int>& keep);
  Registers poll_together(const Registers& need, const std::set<int>& keep);

  // emit_cuda_pieces.cpp.
  bool choose_pieces();
  bool of_columns(int i) const;
  bool fits_pieces(const Instruction& one) const;
  int64_t registers_of(int i) const;
  int64_t registers_of_first_loads() const;
  bool choose_group();
  void choose_turns();
  void open_pieces();
  void columns_in_pieces(int when);
  std::set<int> loads_kept(int when) const;
  void load_pieces(const std::set<int>& loads, const std::string& open);
  void open_turn();
  std::string aligned_piece(const Instruction& one);
  std::string kept_in_piece(int i) const;
  bool is_raw(const Instruction& one) const;
  bool packed(int i) const;
  std::set<int> keep_packed(int when, const Registers& need) const;
  Instruction unrounded_if_stored(int i) const;

  FunctionWriter& to_;
  const std::vector<Instruction>& code_;
  RowNest nest_;
  const RowExpressions expressions_;
  static constexpr int kMostTurns = 16, kMostKept = 48;  // columns and registers per thread
  static constexpr size_t kShortProgram = 12;            // short enough to be unrolled eight times
  static constexpr size_t kShortAmongPlaces = 8;         // the same if several indices determine an element's address
  std::vector<int> level_;
  int last_level_ = 0;
  int turns_ = 0;           // of a GPU: columns per thread, if they are few
  bool in_runs_ = false;    // and contiguous
  int piece_ = 0;           // contiguous columns of a large program that a thread takes at once; 0: not in pieces
  const char* group_ = "";  // the threads of a row, for programs in pieces
  std::set<int> declared_;  // loads whose pieces have a name already
  bool seldom_ = false;     // in a rarely taken branch that should use few registers
  std::set<int> kept_;
  std::map<int, std::string> polled_;  // loads of this pass that have arrived already
};

}  // namespace ark::compiler
