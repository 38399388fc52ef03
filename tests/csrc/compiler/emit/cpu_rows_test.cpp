// Tests the CPU target's row programs: every operator with every kind of type, loads and stores of every type with
// every kind of stride, and what is refused. Random programs are in cpu_graph_test.cpp, reductions in
// cpu_row_reductions_test.cpp.
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "compiler/fuse/row_program.hpp"
#include "compiler/verify/interpreter.hpp"

namespace ark::compiler::test {
namespace {

TEST(CpuRowsTest, EveryOperatorOverEveryKindOfType) {
  CpuCase made(11);
  struct Try {
    std::string op;
    std::vector<int> in;
    int out;
    double literal;
  };
  std::vector<Try> all;
  const Shape shape{1, 19};
  const ScalarType groups[] = {ScalarType::f32, ScalarType::i64, ScalarType::boolean, ScalarType::bf16};
  for (const PointwiseOp& op : pointwise_ops()) {
    const std::string name = op.name;
    for (const ScalarType type : groups) {
      const bool bits = name.rfind("bitwise_", 0) == 0;
      if (bits ? is_floating(type) : false) continue;
      if (type == ScalarType::boolean && (name == "neg" || name == "sub" || name == "abs" || name == "sign")) continue;
      // All other operators compute float32 from integers.
      static const std::set<std::string> whole = {
          "neg",  "abs",         "relu",       "floor",       "ceil",        "round",     "trunc",        "sign",
          "add",  "sub",         "mul",        "maximum",     "minimum",     "remainder", "floor_divide", "where",
          "cast", "bitwise_not", "bitwise_or", "bitwise_and", "bitwise_xor", "copy"};
      ScalarType result = op.boolean ? ScalarType::boolean : type;
      if (!op.boolean && !is_floating(type) && whole.count(name) == 0) result = ScalarType::f32;
      if (type == ScalarType::boolean && (name == "remainder" || name == "floor_divide")) continue;
      Program program(made, shape, 1, -1);
      Try one{name, {}, made.output(result, shape), 0};
      std::vector<int> args;
      const bool by_literal = name == "pow" || name == "remainder" || name == "floor_divide";
      for (int i = 0; i < op.operands; ++i) {
        const ScalarType kind = name == "where" && i == 0 ? ScalarType::boolean : type;
        if (by_literal && i == 1) {
          one.literal = name == "pow" ? 3 : -3;
          args.push_back(program.literal(kind == ScalarType::boolean ? ScalarType::i64 : kind, one.literal));
          continue;
        }
        const bool positive =
            name == "log" || name == "sqrt" || name == "rsqrt" || name == "reciprocal" || name == "div";
        const int value = made.input(kind, shape, [=](std::mt19937_64& random) {
          const double x = static_cast<double>(random() % 13) / 2 - (positive ? -1 : 3);
          return kind == ScalarType::boolean ? static_cast<double>(random() % 2)
                 : is_floating(kind)         ? x
                                             : std::floor(x);
        });
        one.in.push_back(value);
        args.push_back(program.load(value));
      }
      program.store(one.out, program.op(name, args, result));
      program.done();
      all.push_back(one);
    }
  }
  run_quickly(made, 1);
  for (const Try& one : all) {
    const ScalarType type = made.graph.values()[static_cast<size_t>(one.out)].type;
    for (int64_t i = 0; i < shape[1]; ++i) {
      std::vector<double> x;
      std::vector<ScalarType> from;
      for (const int value : one.in) {
        x.push_back(made.get(value, {0, i}));
        from.push_back(made.graph.values()[static_cast<size_t>(value)].type);
      }
      if (one.literal != 0) {
        x.push_back(one.literal);
        from.push_back(from[0] == ScalarType::boolean ? ScalarType::i64 : from[0]);
      }
      const double want = apply_typed(one.op, x, from, type);
      expect_near(made.get(one.out, {0, i}), want, type,
                  one.op + " of " + name_of(from[0]) + " " + std::to_string(x[0]) + " to " + name_of(type));
    }
  }
}

// Strides of [rows, columns]: adjacent columns, spaced columns, adjacent rows, padded rows.
Shape strides_of(int kind, int64_t rows, int64_t columns) {
  if (kind == 0) return {columns, 1};
  if (kind == 1) return {columns * 3, 3};
  if (kind == 2) return {1, rows};
  return {columns + 7, 1};
}

TEST(CpuRowsTest, EveryTypeToEveryTypeWithEveryStride) {
  CpuCase made(12);
  struct Try {
    int in, out;
  };
  std::vector<Try> all;
  const int64_t rows = 5, columns = 37;
  int kind = 0;
  for (const ScalarType from : kTypes)
    for (const ScalarType to : kTypes) {
      ++kind;
      Try one{
          made.input(from, {rows, columns}, CpuCase::integers(-9, 9), strides_of(kind % 4, rows, columns), kind % 3),
          made.output(to, {rows, columns}, strides_of((kind / 4) % 4, rows, columns))};
      Program program(made, {rows, columns}, 1, kind % 2);
      program.store(one.out, program.op("cast", {program.load(one.in)}, to));
      program.done();
      all.push_back(one);
    }
  run_quickly(made, 2);
  for (const Try& one : all) {
    const ScalarType to = made.graph.values()[static_cast<size_t>(one.out)].type;
    for_each_index({rows, columns}, [&](const std::vector<int64_t>& at) {
      const double x = made.get(one.in, at);
      EXPECT_EQ(made.get(one.out, at), to == ScalarType::boolean ? (x != 0 ? 1 : 0) : x) << name_of(to);
    });
  }
}

// Integer powers wrap around and are exact. Negative exponents give 0, except for the bases 1 and -1.
TEST(CpuRowsTest, PowersOfWholeNumbers) {
  CpuCase made(18);
  const std::vector<double> bases{0, 1, -1, 2, -3, 10, 7, -2, 2, 3}, powers{0, 5, -3, 62, 3, 18, 1, 63, -1, -2},
      want{1, 1, -1, 0x1p62, -27, 1e18, 7, -0x1p63, 0, 0};
  for (const ScalarType type : {ScalarType::i64, ScalarType::i32}) {
    const int x = made.input(type, {1, 10}, CpuCase::integers(0, 1)),
              y = made.input(type, {1, 10}, CpuCase::integers(0, 1));
    const int out = made.output(ScalarType::i64, {1, 10});
    for (int64_t i = 0; i < 10; ++i) {
      made.set(x, {0, i}, bases[static_cast<size_t>(i)]);
      made.set(y, {0, i}, powers[static_cast<size_t>(i)]);
    }
    Program program(made, {1, 10}, 1, -1);
    program.store(out, program.op("pow", {program.load(x), program.load(y)}, ScalarType::i64));
    program.done();
  }
  run_quickly(made, 1);
  for (size_t type = 0; type < 2; ++type)
    for (int64_t i = 0; i < 10; ++i)
      EXPECT_EQ(made.get(static_cast<int>(type) * 3 + 2, {0, i}), want[static_cast<size_t>(i)])
          << bases[static_cast<size_t>(i)];
}

// Programs that would be wrong or crash the process are refused with the stage's name.
TEST(CpuRowsTest, RefusedWithAReason) {
  auto refused = [](const std::function<void(CpuCase&, Program&, int, int)>& write, const char* why) {
    CpuCase made(17);
    const int x = made.input(ScalarType::i64, {1, 8}, CpuCase::integers(1, 5));
    const int y = made.output(ScalarType::i64, {1, 8});
    Program program(made, {1, 8}, 1, -1);
    write(made, program, x, y);
    program.done();
    try {
      CpuLoop loop(made.plan(1), quick_compiler());
      ADD_FAILURE() << why;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("stage0"), std::string::npos) << error.what();
    }
  };
  const auto i64 = ScalarType::i64;
  refused(
      [&](CpuCase&, Program& program, int x, int y) {
        const int in = program.load(x);
        program.store(y, program.op("remainder", {in, in}, i64));
      },
      "division by zero");
  refused(
      [&](CpuCase&, Program& program, int x, int y) {
        program.store(y, program.op("floor_divide", {program.load(x), program.literal(i64, 0)}, i64));
      },
      "division by zero");
  refused([&](CpuCase&, Program& program, int x,
              int y) { program.store(y, program.op("frobnicate", {program.load(x)}, i64)); },
          "frobnicate");
}

}  // namespace
}  // namespace ark::compiler::test
