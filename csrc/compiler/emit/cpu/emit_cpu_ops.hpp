// Translates the instructions of a row program to C++ expressions over lanes. Rounding to an instruction's type is part
// of the expression.
#pragma once

#include <string>

#include "compiler/emit/cpu/emit_cpu_function.hpp"

namespace ark::compiler {

// "Floats", "Ints" or "Mask": the lanes that hold a register of the type.
const char* lanes_of(ScalarType type);

class RowExpressions {
 public:
  RowExpressions(FunctionWriter& to, const RowProgram& program) : to_(to), code_(program.code) {}

  // Refuses an unknown operator.
  void check(const RowProgram::Instruction& one) const;
  // The register of instruction `arg` (or the literal itself) converted to the given lanes.
  std::string argument(int arg, const std::string& lanes) const;
  // The operator of `one` applied to its arguments and rounded to its type.
  std::string call(const RowProgram::Instruction& one) const;
  static std::string rounded(const RowProgram::Instruction& one, const std::string& expression);
  // Whether keeping the result is cheaper than computing it again.
  static bool expensive(const RowProgram::Instruction& one);
  static std::string name(int i) { return formatted("r{}", i); }

 private:
  const RowProgram::Instruction& at(int i) const { return code_[static_cast<size_t>(i)]; }
  Value literal(const RowProgram::Instruction& one) const;
  const char* computed_lanes(const RowProgram::Instruction& one) const;
  void known_power(const RowProgram::Instruction& one, const char* lanes, std::string& function, size_t& args) const;

  FunctionWriter& to_;
  const std::vector<RowProgram::Instruction>& code_;
};

}  // namespace ark::compiler
