// The functions of a plan's stages as source text. Stages with equal text share a function. emit_cpu.cpp and
// emit_cuda.cpp build on this.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "compiler/emit/cpu/emit_cpu_function.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {

class StageFunctions {
 public:
  // Throws Error(invalid_argument) for a stage that the target cannot run.
  StageFunctions(const Plan& plan, Code code);

  const std::vector<std::string>& texts() const { return texts_; }  // by function
  const std::vector<std::string>& names() const { return names_; }
  // What one call of a function runs: unit s is stage s; the units after those are stages whose tasks start with
  // another stage (Task::head).
  struct Unit {
    int head = -1, stage = -1;
  };
  const std::vector<Unit>& units() const { return units_; }
  size_t unit_of(const Task& task) const;
  size_t function_of(size_t unit) const { return function_of_[unit]; }
  const std::vector<int>& operands(size_t unit) const { return operands_[unit]; }  // values; empty if no task runs it
  int64_t scratch_bytes() const { return scratch_bytes_; }
  // By function: the variant to run if an operand that should be at a multiple of 16 bytes is not; empty if each such
  // operand starts at such a multiple of its buffer. (Variants of all functions double a kernel's time to compile.)
  // With a variant, the function itself is a template, called as name<true>.
  const std::vector<std::string>& misaligned() const { return misaligned_; }
  bool aligned(size_t unit, size_t operand) const { return aligned_[unit][operand]; }  // whether it should be
  // Whether any function multiplies with warp groups (kernels/cuda/loop/tile_group.cuh).
  bool by_groups() const { return by_groups_; }

 private:
  void add(const Unit& unit);
  void write(FunctionWriter& writer, const Stage& stage);
  void write_head(FunctionWriter& writer, const Unit& unit);
  static void write_appended(FunctionWriter& writer, const Stage& stage);
  bool starts_aligned(const FunctionWriter& writer) const;

  const Plan& plan_;
  const Code code_;
  std::map<std::string, size_t> known_;  // body -> function
  std::vector<std::string> texts_, names_, misaligned_;
  std::map<size_t, std::vector<std::string>> used_by_;  // function -> stages
  std::vector<Unit> units_;
  std::vector<size_t> function_of_;         // by unit
  std::vector<std::vector<int>> operands_;  // by unit
  std::vector<std::vector<bool>> aligned_;  // by unit and operand
  int64_t scratch_bytes_ = 0;
  bool by_groups_ = false;
};

// Turns names and origins, which users choose, into text that cannot end a one-line comment.
std::string in_comment(const std::string& text);

}  // namespace ark::compiler
