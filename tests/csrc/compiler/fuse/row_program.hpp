// Test support for emitted rows: a row program is written instruction by instruction, and compiled without optimisation
// to save time.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "compiler/emit/cpu_case.hpp"

namespace ark::compiler::test {

inline constexpr ScalarType kTypes[] = {ScalarType::f32, ScalarType::bf16, ScalarType::f16,
                                        ScalarType::i64, ScalarType::i32,  ScalarType::boolean};

// A program, written instruction by instruction.
class Program {
 public:
  using Instruction = RowProgram::Instruction;
  using Kind = Instruction::Kind;

  Program(CpuCase& made, const Shape& shape, int inner, int axis) : made_(made) {
    program_.shape = shape;
    program_.inner = inner;
    program_.axis = axis;
  }
  int load(int value, bool scalar = false) { return access(Kind::load, value, {}, scalar); }
  void store(int value, int from, bool scalar = false) { access(Kind::store, value, {from}, scalar); }
  int literal(ScalarType type, double x) {
    Instruction one;
    one.kind = Kind::literal;
    one.value = made_.literal(type, x);
    one.type = type;
    one.scalar = true;
    return add(one);
  }
  int op(const std::string& name, const std::vector<int>& args, ScalarType type, bool scalar = false) {
    return named(Kind::op, name, args, type, scalar);
  }
  int reduce(const std::string& name, int from, ScalarType type) {
    return named(Kind::reduce, name, {from}, type, true);
  }
  // Adds the stage. Tiles cut program_.axis.
  void done() {
    const int axis = program_.axis;
    const int64_t extent = axis < 0 ? 1 : program_.shape[static_cast<size_t>(axis)];
    made_.stage(program_, accesses_, extent);
  }

 private:
  int add(const Instruction& one) {
    program_.code.push_back(one);
    return static_cast<int>(program_.code.size()) - 1;
  }
  int named(Kind kind, const std::string& name, const std::vector<int>& args, ScalarType type, bool scalar) {
    Instruction one;
    one.kind = kind;
    one.name = name;
    one.args = args;
    one.type = type;
    one.scalar = scalar;
    return add(one);
  }
  // The value has the program's dimensions, with size 1 where it does not vary.
  int access(Kind kind, int value, std::vector<int> args, bool scalar) {
    const Value& at = made_.graph.values()[static_cast<size_t>(value)];
    Instruction one;
    one.kind = kind;
    one.value = value;
    one.args = std::move(args);
    one.type = at.type;
    one.scalar = scalar;
    for (size_t d = 0; d < at.shape.size(); ++d) one.strides.push_back(at.shape[d] == 1 ? 0 : at.strides[d]);
    const bool cut = program_.axis >= 0 && at.shape[static_cast<size_t>(program_.axis)] > 1;
    accesses_.push_back({value, cut ? program_.axis : -1, kind == Kind::store});
    return add(one);
  }

  CpuCase& made_;
  RowProgram program_;
  std::vector<Access> accesses_;
};

inline jit::HostCompiler& quick_compiler() {
  static auto* compiler = [] {
    jit::Settings settings = cpu_settings();
    settings.cxx_options.push_back("-O0");
    return new jit::HostCompiler(settings);
  }();
  return *compiler;
}
inline void run_quickly(CpuCase& made, int workers) {
  CpuLoop loop(made.plan(workers), quick_compiler());
  made.run(loop);
}

inline void expect_near(double got, double want, ScalarType type, const std::string& what) {
  if (std::isnan(want) ? std::isnan(got) : got == want) return;
  const double allowed = is_floating(type) ? (epsilon_of(type) * 1.01 + 1e-6) * std::abs(want) + 1e-7 : 0;
  EXPECT_LE(std::abs(got - want), allowed) << what << ": " << got << ", not " << want;
}

}  // namespace ark::compiler::test
