// Row programs of the CPU target: every operator over every kind of type, every type loaded and stored with every kind
// of stride, reductions one behind the other, rows in place. Random programs are in cpu_graph_test.cpp.
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "plan/cpu_case.hpp"
#include "plan/interpreter.hpp"

namespace ark::plan::test {
namespace {

using Instruction = RowProgram::Instruction;
using Kind = Instruction::Kind;

constexpr ScalarType kTypes[] = {ScalarType::f32, ScalarType::bf16, ScalarType::f16,
                                 ScalarType::i64, ScalarType::i32,  ScalarType::boolean};

// A program, written instruction by instruction.
class Program {
 public:
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
  // Tiles cut program_.axis.
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
  // The value has the program's dimensions, 1 long where it does not vary.
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

jit::HostCompiler& quick_compiler() {
  static auto* compiler = [] {
    jit::Settings settings = cpu_settings();
    settings.cxx_options.push_back("-O0");
    return new jit::HostCompiler(settings);
  }();
  return *compiler;
}
void run_quickly(CpuCase& made, int workers) {
  CpuLoop loop(made.plan(workers), quick_compiler());
  made.run(loop);
}

void expect_near(double got, double want, ScalarType type, const std::string& what) {
  if (std::isnan(want) ? std::isnan(got) : got == want) return;
  const double allowed = is_floating(type) ? (epsilon_of(type) * 1.01 + 1e-6) * std::abs(want) + 1e-7 : 0;
  EXPECT_LE(std::abs(got - want), allowed) << what << ": " << got << ", not " << want;
}

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
      // What gives fractions gives float32 of whole numbers.
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

// [rows, columns] with columns adjacent, apart, rows adjacent, backwards-padded.
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

// Softmax and the mean of its logarithm's square: three reductions one behind the other, expensive registers kept.
TEST(CpuRowsTest, ReductionsBehindReductions) {
  CpuCase made(13);
  const int64_t rows = 7, columns = 83;
  const int x = made.input(ScalarType::f32, {rows, columns}, CpuCase::normal(3));
  const int y = made.output(ScalarType::f32, {rows, columns}), z = made.output(ScalarType::f32, {rows, 1});
  const int where = made.output(ScalarType::i64, {rows, 1});
  Program program(made, {rows, columns}, 1, 0);
  const auto f32 = ScalarType::f32;
  const int in = program.load(x);
  const int most = program.reduce("amax", in, f32);
  const int power = program.op("exp", {program.op("sub", {in, most}, f32)}, f32);
  const int share = program.op("div", {power, program.reduce("sum", power, f32)}, f32);
  program.store(y, share);
  const int logarithm = program.op("log", {share}, f32);
  const int mean = program.reduce("mean", program.op("mul", {logarithm, logarithm}, f32), f32);
  program.store(z, program.op("sqrt", {mean}, f32, true), true);
  program.store(where, program.reduce("argmax", share, ScalarType::i64), true);
  program.done();
  // One element a row masked with -inf, one row with nothing but.
  made.set(x, {2, 5}, -std::numeric_limits<double>::infinity());
  for (int64_t c = 0; c < columns; ++c) made.set(x, {4, c}, -std::numeric_limits<double>::infinity());
  CpuLoop loop(made.plan(3), cpu_compiler());
  made.run(loop);
  for (int64_t r = 0; r < rows; ++r) {
    double greatest = -HUGE_VAL, sum = 0, squares = 0;
    int64_t at = 0;
    for (int64_t c = 0; c < columns; ++c)
      if (made.get(x, {r, c}) > greatest) greatest = made.get(x, {r, c}), at = c;
    for (int64_t c = 0; c < columns; ++c) sum += std::exp(made.get(x, {r, c}) - greatest);
    for (int64_t c = 0; c < columns; ++c) {
      const double share = std::exp(made.get(x, {r, c}) - greatest) / sum;
      EXPECT_TRUE(r == 4 ? std::isnan(made.get(y, {r, c})) : std::abs(made.get(y, {r, c}) - share) <= 1e-6 * share)
          << r << ", " << c;
      squares += std::log(share) * std::log(share) / static_cast<double>(columns);
    }
    if (r == 4) continue;
    EXPECT_EQ(made.get(where, {r, 0}), static_cast<double>(at));
    if (r == 2)
      EXPECT_EQ(made.get(z, {r, 0}), HUGE_VAL);
    else
      EXPECT_NEAR(made.get(z, {r, 0}), std::sqrt(squares), 1e-5 * std::sqrt(squares));
  }
}

// Columns of several dimensions, transposed: the vector runs along the adjacent one.
TEST(CpuRowsTest, ReductionOverSeveralDimensions) {
  CpuCase made(14);
  const Shape shape{4, 6, 35};
  const int x = made.input(ScalarType::f32, shape, CpuCase::normal(), {6 * 35, 1, 6});
  const int y = made.output(ScalarType::f32, {4, 1, 1});
  Program program(made, shape, 2, 0);
  program.store(y, program.reduce("mean", program.load(x), ScalarType::f32), true);
  program.done();
  CpuLoop loop(made.plan(2), cpu_compiler());
  made.run(loop);
  for (int64_t r = 0; r < 4; ++r) {
    double sum = 0;
    for_each_index({6, 35}, [&](const std::vector<int64_t>& at) { sum += made.get(x, {r, at[0], at[1]}); });
    EXPECT_NEAR(made.get(y, {r, 0, 0}), sum / (6 * 35), 1e-6);
  }
}

// x -= mean(x), written over x: the second pass must not read what the first has written.
TEST(CpuRowsTest, InPlace) {
  CpuCase made(15);
  const int64_t rows = 3, columns = 50;
  const int x = made.input(ScalarType::f32, {rows, columns}, CpuCase::normal(), {}, 0, true);
  Program program(made, {rows, columns}, 1, 0);
  const int in = program.load(x);
  program.store(x, program.op("sub", {in, program.reduce("mean", in, ScalarType::f32)}, ScalarType::f32));
  program.done();
  std::vector<double> before;
  for_each_index({rows, columns}, [&](const std::vector<int64_t>& at) { before.push_back(made.get(x, at)); });
  CpuLoop loop(made.plan(2), cpu_compiler());
  made.run(loop);
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (int64_t c = 0; c < columns; ++c) sum += before[static_cast<size_t>(r * columns + c)];
    for (int64_t c = 0; c < columns; ++c)
      EXPECT_NEAR(made.get(x, {r, c}), before[static_cast<size_t>(r * columns + c)] - sum / columns, 1e-6);
  }
}

// Gather and scatter move elements of every type as they are, through any dimension.
TEST(CpuRowsTest, GatherAndScatterOfEveryType) {
  CpuCase made(16);
  struct Try {
    int table, index, out, base, source, places;
    int dim;
  };
  std::vector<Try> all;
  for (const ScalarType type : kTypes)
    for (int dim = 0; dim < 2; ++dim) {
      Try one{};
      one.dim = dim;
      const int64_t size = dim == 0 ? 9 : 21;
      one.table = made.input(type, {9, 21}, CpuCase::integers(-50, 50), dim == 0 ? Shape{} : Shape{1, 9});
      one.index = made.input(dim == 0 ? ScalarType::i64 : ScalarType::i32, {4}, CpuCase::integers(0, size - 1));
      one.out = made.output(type, dim == 0 ? Shape{4, 21} : Shape{9, 4});
      made.stage(GatherStage{one.table, one.index, one.out, dim},
                 {{one.table, dim == 0 ? -1 : 0, false}, {one.index, dim == 0 ? 0 : -1, false}, {one.out, 0, true}},
                 dim == 0 ? 4 : 9);
      one.base = made.input(type, {9, 21}, CpuCase::integers(-50, 50), {}, 0, true);
      one.source = made.input(type, dim == 0 ? Shape{3, 21} : Shape{9, 3}, CpuCase::integers(60, 99));
      one.places = made.input(ScalarType::i64, {3}, CpuCase::integers(0, 2));
      for (int64_t i = 0; i < 3; ++i) made.set(one.places, {i}, static_cast<double>((i * 2 + 1) % size));
      // Cut along the dimension that is not indexed.
      made.stage(ScatterStage{one.base, one.places, one.source, dim},
                 {{one.base, 1 - dim, true}, {one.places, -1, false}, {one.source, 1 - dim, false}}, dim == 0 ? 21 : 9);
      all.push_back(one);
    }
  CpuLoop loop(made.plan(2), cpu_compiler());
  made.run(loop);
  for (const Try& one : all) {
    const bool rows = one.dim == 0;
    for_each_index(rows ? Shape{4, 21} : Shape{9, 4}, [&](const std::vector<int64_t>& at) {
      const auto i = static_cast<int64_t>(made.get(one.index, {at[rows ? 0 : 1]}));
      EXPECT_EQ(made.get(one.out, at), made.get(one.table, rows ? Shape{i, at[1]} : Shape{at[0], i}));
    });
    for_each_index(rows ? Shape{3, 21} : Shape{9, 3}, [&](const std::vector<int64_t>& at) {
      const auto i = static_cast<int64_t>(made.get(one.places, {at[rows ? 0 : 1]}));
      EXPECT_EQ(made.get(one.base, rows ? Shape{i, at[1]} : Shape{at[0], i}), made.get(one.source, at));
    });
    const Shape untouched = rows ? Shape{0, 7} : Shape{7, 0};
    EXPECT_LT(made.get(one.base, untouched), 60);
  }
}

// What would be wrong, or end the process, is refused with the stage's name.
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
  refused(
      [&](CpuCase&, Program& program, int x, int y) {
        const int in = program.load(x);
        program.store(y, program.op("pow", {in, in}, i64));
      },
      "powers");
  refused([&](CpuCase&, Program& program, int x,
              int y) { program.store(y, program.op("frobnicate", {program.load(x)}, i64)); },
          "frobnicate");
}

}  // namespace
}  // namespace ark::plan::test
