// Tests many steps in one launch: multi-step plans in CpuLoop. Tiles of other workers read in the next step what one
// step leaves, so that a missing wait is a race (ThreadSanitizer) and a wrong number.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "compiler/emit/cpu_case.hpp"
#include "compiler/passes/pipeline.hpp"
#include "compiler/runtime/cpu_loop.hpp"

namespace ark::compiler::test {
namespace {

using Instruction = RowProgram::Instruction;
using Kind = Instruction::Kind;

// to = name(from, with), row by row.
RowProgram binary(const CpuCase& made, const std::string& name, int from, int with, int to, ScalarType type) {
  const Value& out = made.graph.values()[static_cast<size_t>(to)];
  RowProgram program;
  program.shape = out.shape;
  program.inner = 1;
  program.axis = out.shape.size() > 1 ? 0 : -1;
  auto add = [&](Kind kind, std::vector<int> args, int value, ScalarType of) {
    Instruction one;
    one.kind = kind;
    if (kind == Kind::op) one.name = name;
    one.args = std::move(args);
    one.value = value;
    one.type = of;
    if (kind == Kind::load || kind == Kind::store)
      one.strides = made.graph.values()[static_cast<size_t>(value)].strides;
    program.code.push_back(one);
  };
  const bool literal = made.graph.values()[static_cast<size_t>(with)].is_literal();
  add(Kind::load, {}, from, type);
  add(literal ? Kind::literal : Kind::load, {}, with, type);
  add(Kind::op, {0, 1}, -1, out.type);
  add(Kind::store, {2}, to, out.type);
  return program;
}

// Each step transposes and adds one, five times, the last time in place. It counts itself and stops at `limit`.
class Loop {
 public:
  static constexpr int64_t kRows = 24;
  static constexpr int kStages = 5;

  explicit Loop(bool stops = true) {
    state = made.input(ScalarType::f32, {kRows, kRows}, CpuCase::integers(0, 9), {}, 0, true);
    count = made.input(ScalarType::i64, {1}, CpuCase::integers(0, 0), {}, 0, true);
    limit = made.input(ScalarType::i64, {1}, CpuCase::integers(1 << 30, 1 << 30));
    int last = state;
    const int one = made.literal(ScalarType::f32, 1);
    for (int i = 0; i < kStages; ++i) {
      const int next = i + 1 == kStages ? state : made.temporary(ScalarType::f32, {kRows, kRows});
      const int turned = made.view(last, {kRows, kRows}, {1, kRows});
      made.stage(binary(made, "add", turned, one, next, ScalarType::f32), {{turned, 0, false}, {next, 0, true}}, kRows);
      last = next;
    }
    made.stage(binary(made, "add", count, made.literal(ScalarType::i64, 1), count, ScalarType::i64),
               {{count, -1, false}, {count, -1, true}}, 1);
    if (!stops) return;
    const int over = made.temporary(ScalarType::boolean, {1});
    made.stage(binary(made, "ge", count, limit, over, ScalarType::i64),
               {{count, -1, false}, {limit, -1, false}, {over, -1, true}}, 1);
    made.stage(StopStage{over}, {{over, -1, false}}, 1).replicable = true;
  }

  Plan plan(int workers, bool multi_step = true) {
    Target target;
    target.workers = workers;
    return plan_stages(made.graph, made.stages, target, multi_step);
  }

  CpuCase made{1};
  int state = -1, count = -1, limit = -1;
};

// The arguments of one caller, and their expected values.
struct Caller {
  std::vector<float> x = std::vector<float>(Loop::kRows * Loop::kRows);
  int64_t count = 0, limit = 1 << 30;

  explicit Caller(int seed) {
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(seed + static_cast<int>(i % 7));
  }
  uint64_t run(CpuLoop& loop, const CpuLoop::Steps& steps) {
    const void* in[] = {x.data(), &count, &limit};
    return loop.run_steps(in, nullptr, steps);
  }
  // Counts wrong elements after that many steps from `before`.
  static int wrong(const std::vector<float>& before, const std::vector<float>& after, uint64_t steps) {
    int found = 0;
    for (int64_t i = 0; i < Loop::kRows * Loop::kRows; ++i) {
      const int64_t turned = i % Loop::kRows * Loop::kRows + i / Loop::kRows;
      const float want = before[static_cast<size_t>(steps * Loop::kStages % 2 == 1 ? turned : i)];
      found += after[static_cast<size_t>(i)] == want + static_cast<float>(steps * Loop::kStages) ? 0 : 1;
    }
    return found;
  }
};

TEST(CpuStepsTest, ManyStepsManyCallers) {
  for (const int workers : {1, 2, 4}) {
    Loop made;
    CpuLoop loop(made.plan(workers), cpu_compiler());
    std::atomic<int> wrong{0};
    auto call = [&](int seed) {
      Caller mine(seed);
      for (const uint64_t steps : {40, 1, 7, 2}) {
        const std::vector<float> before = mine.x;
        mine.count = 0;
        wrong += mine.run(loop, {.most = steps}) == steps ? 0 : 1;
        wrong += Caller::wrong(before, mine.x, steps) + (mine.count == static_cast<int64_t>(steps) ? 0 : 1);
      }
    };
    std::vector<std::thread> callers;
    for (int i = 0; i < 2; ++i) callers.emplace_back(call, i * 100);
    for (auto& one : callers) one.join();
    EXPECT_EQ(wrong, 0) << workers;
  }
}

TEST(CpuStepsTest, AllWorkersStopAfterTheSameStep) {
  Loop made;
  CpuLoop loop(made.plan(4), cpu_compiler());
  Caller mine(3);
  for (const int64_t limit : {5, 1, 12, 40, 2}) {
    const std::vector<float> before = mine.x;
    mine.count = 0;
    mine.limit = limit;
    const uint64_t done = mine.run(loop, {.most = 30});
    EXPECT_EQ(done, static_cast<uint64_t>(std::min<int64_t>(limit, 30)));
    EXPECT_EQ(mine.count, static_cast<int64_t>(done));
    EXPECT_EQ(Caller::wrong(before, mine.x, done), 0);
  }
}

// A launch without a step limit, ended by the caller's own check.
TEST(CpuStepsTest, EndsFromOutside) {
  Loop made(false);
  CpuLoop loop(made.plan(3), cpu_compiler());
  Caller mine(1);
  const auto expect_aborted = [&](const CpuLoop::Steps& steps) {
    try {
      mine.run(loop, steps);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::aborted) << error.what();
    }
    const std::vector<float> before = mine.x = Caller(7).x;  // a failed launch must not affect the next one
    EXPECT_EQ(mine.run(loop, {.most = 3}), 3u);
    EXPECT_EQ(Caller::wrong(before, mine.x, 3), 0);
  };
  constexpr uint64_t kForEver = uint64_t{1} << 60;
  // The time limit is per step, not for all steps. The caller is asked about twenty times a second.
  loop.set_timeout(std::chrono::milliseconds(800));
  struct Asker {
    std::thread::id thread;
    int asked = 0;
  } asker;
  CpuLoop::Steps steps{.most = kForEver};
  steps.asker = &asker;
  steps.interrupted = [](void* argument) {
    Asker& one = *static_cast<Asker*>(argument);
    one.thread = std::this_thread::get_id();
    return ++one.asked == 20;
  };
  expect_aborted(steps);
  EXPECT_EQ(asker.asked, 20);
  EXPECT_EQ(asker.thread, std::this_thread::get_id());
}

// In the first step a wait for the previous one is already satisfied. A wait for a missing signal ends at the deadline.
TEST(CpuStepsTest, AWaitForAnotherStepHasADeadline) {
  Loop made(false);
  Plan plan = made.plan(2);
  ASSERT_TRUE(
      std::any_of(plan.tasks.begin(), plan.tasks.end(), [](const Task& task) { return !task.carried.empty(); }));
  for (Task& task : plan.tasks)
    for (const int event : task.carried) ++plan.events[static_cast<size_t>(event)].threshold;
  CpuLoop loop(plan, cpu_compiler());
  loop.set_timeout(std::chrono::milliseconds(50));
  Caller mine(1);
  try {
    mine.run(loop, {.most = 9});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::timeout) << error.what();
    EXPECT_NE(std::string(error.what()).find("waited longer than 50 ms"), std::string::npos) << error.what();
  }
}

TEST(CpuStepsTest, CollectivesOfEveryStep) {
  Loop made(false);
  const int total = made.made.temporary(ScalarType::f32, {Loop::kRows, Loop::kRows});
  made.made.stage(CollectiveStage{made.state, total}, {{made.state, -1, false}, {total, -1, true}}, 1).node = 3;
  made.made.stage(binary(made.made, "add", total, made.made.literal(ScalarType::f32, 0), made.state, ScalarType::f32),
                  {{total, 0, false}, {made.state, 0, true}}, Loop::kRows);
  CpuLoop loop(made.plan(3), cpu_compiler());
  struct Host {
    int calls = 0, fails = -1;
  } host;
  loop.set_collective(
      [](void* argument, int32_t, const void* from, void* to) {
        Host& mine = *static_cast<Host*>(argument);
        std::memcpy(to, from, Loop::kRows * Loop::kRows * sizeof(float));
        return mine.calls++ != mine.fails;
      },
      &host);
  Caller mine(2);
  const std::vector<float> before = mine.x;
  EXPECT_EQ(mine.run(loop, {.most = 25}), 25u);
  EXPECT_EQ(host.calls, 25);
  EXPECT_EQ(Caller::wrong(before, mine.x, 25), 0);
  host = {0, 4};
  EXPECT_THROW(mine.run(loop, {.most = 25}), Error);
  EXPECT_EQ(host.calls, 5);
}

TEST(CpuStepsTest, OnlyChainedPlansHaveSteps) {
  Loop made(false);
  CpuLoop loop(made.plan(2, false), cpu_compiler());
  Caller mine(2);
  EXPECT_EQ(mine.run(loop, {.most = 1}), 1u);
  EXPECT_THROW(mine.run(loop, {.most = 2}), Error);
  EXPECT_THROW(mine.run(loop, {.most = 0}), Error);
  Loop stops;
  EXPECT_THROW(stops.plan(2, false), Error);
}

// Built from nodes: a counting graph computes the stop condition. It is small enough for every worker to compute it
// all.
TEST(CpuStepsTest, StopIsANodeOfAGraph) {
  Graph graph;
  const auto value = [&](Buffer::Kind kind, int argument, ScalarType type) {
    Buffer buffer;
    buffer.kind = kind;
    buffer.argument = argument;
    buffer.bytes = size_of(type);
    buffer.mutated = kind == Buffer::Kind::input;
    Value one;
    one.type = type;
    one.shape = {1};
    one.strides = {1};
    one.buffer = graph.add_buffer(buffer);
    return graph.add_value(one);
  };
  const auto literal = [&](double x) {
    Value one;
    one.type = ScalarType::i64;
    one.literal = x;
    return graph.add_value(one);
  };
  const int count = value(Buffer::Kind::input, 0, ScalarType::i64);
  const int next = value(Buffer::Kind::temporary, -1, ScalarType::i64);
  const int over = value(Buffer::Kind::temporary, -1, ScalarType::boolean);
  graph.add_node({"add", {count, literal(3)}, {next}, {}, "model.py:1"});
  graph.add_node({"gt", {next, literal(20)}, {over}, {}, "model.py:2"});
  graph.add_node({"stop", {over}, {}, {}, "model.py:3"});
  graph.add_node({"copy", {next}, {count}, {}, "model.py:4"});
  EXPECT_THROW(graph.add_node({"stop", {over, over}, {}, {}, ""}), Error);
  EXPECT_THROW(graph.add_node({"stop", {literal(1)}, {}, {}, ""}), Error);
  Target target;
  target.workers = 3;
  CpuLoop loop(make_plan(graph, target, true), cpu_compiler());
  for (int again = 0; again < 3; ++again) {
    int64_t counted = 0;
    const void* in[] = {&counted};
    EXPECT_EQ(loop.run_steps(in, nullptr, {.most = 100}), 7u);
    EXPECT_EQ(counted, 21);
  }
}

}  // namespace
}  // namespace ark::compiler::test
