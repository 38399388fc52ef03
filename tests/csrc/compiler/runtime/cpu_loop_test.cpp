// Tests the loop and its threads: consecutive steps, concurrent callers, the deadline, an index out of range, a child
// after fork, and collectives as host calls. In a sanitizer build, the compiled code is instrumented as well.
#include "compiler/runtime/cpu_loop.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <regex>
#include <thread>

#include "compiler/emit/cpu_case.hpp"
#include "compiler/runtime/worker_pool.hpp"

namespace ark::compiler::test {
namespace {

using Kind = RowProgram::Instruction::Kind;

// y = x + 1, row by row.
RowProgram add_one(CpuCase& made, int x, int y, int64_t rows, int64_t columns) {
  RowProgram program;
  program.shape = {rows, columns};
  program.inner = 1;
  program.axis = 0;
  auto add = [&](Kind kind, const std::string& name, std::vector<int> args, int value) {
    RowProgram::Instruction one;
    one.kind = kind;
    one.name = name;
    one.args = std::move(args);
    one.value = value;
    if (kind == Kind::load || kind == Kind::store)
      one.strides = made.graph.values()[static_cast<size_t>(value)].strides;
    program.code.push_back(one);
  };
  add(Kind::load, "", {}, x);
  add(Kind::literal, "", {}, made.literal(ScalarType::f32, 1));
  add(Kind::op, "add", {0, 1}, -1);
  add(Kind::store, "", {2}, y);
  return program;
}

// A chain of stages that each transpose and add one. Every tile of rows reads what all tiles before it wrote.
struct Chain {
  static constexpr int64_t kRows = 24, kColumns = kRows;
  CpuCase made{1};
  int input, output;

  explicit Chain(int stages) {
    input = made.input(ScalarType::f32, {kRows, kColumns}, CpuCase::integers(0, 9));
    output = made.output(ScalarType::f32, {kRows, kColumns});
    int last = input;
    for (int i = 0; i < stages; ++i) {
      const int next = i + 1 == stages ? output : made.temporary(ScalarType::f32, {kRows, kColumns});
      const int turned = made.view(last, {kRows, kColumns}, {1, kColumns});
      made.stage(add_one(made, turned, next, kRows, kColumns), {{turned, 0, false}, {next, 0, true}}, kRows);
      last = next;
    }
  }
};

TEST(CpuLoopTest, ManyStepsManyCallers) {
  constexpr int kStages = 9;
  Chain chain(kStages);
  CpuLoop loop(chain.made.plan(3), cpu_compiler());
  std::atomic<int> wrong{0};
  auto call = [&](int seed) {
    std::vector<float> x(Chain::kRows * Chain::kColumns), y(x.size());
    for (int step = 0; step < 60; ++step) {
      for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(seed + step + static_cast<int>(i % 7));
      const void* in[] = {x.data()};
      void* out[] = {y.data()};
      loop.run(in, out);
      for (int64_t i = 0; i < Chain::kRows * Chain::kColumns; ++i) {
        const int64_t turned = i % Chain::kColumns * Chain::kColumns + i / Chain::kColumns;
        wrong += y[static_cast<size_t>(i)] == x[static_cast<size_t>(kStages % 2 == 1 ? turned : i)] + kStages ? 0 : 1;
      }
    }
  };
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) callers.emplace_back(call, i * 1000);
  for (auto& one : callers) one.join();
  EXPECT_EQ(wrong, 0);
}

TEST(CpuLoopTest, StampsOfEveryTaskAndWait) {
  Chain chain(3);
  CpuLoop loop(chain.made.plan(2), cpu_compiler());
  std::vector<float> x(Chain::kRows * Chain::kColumns), y(x.size());
  const void* in[] = {x.data()};
  void* out[] = {y.data()};
  StepStamps stamps;
  for (int again = 0; again < 2; ++again) {
    loop.run(in, out, &stamps);
    ASSERT_EQ(stamps.tasks.size(), loop.plan().tasks.size());
    size_t wait = 0;
    for (size_t i = 0; i < stamps.tasks.size(); ++i) {
      const cpu::Stamp& one = stamps.tasks[i];
      EXPECT_GT(one.came_ns, 0u);
      uint64_t last = one.came_ns;
      for (size_t w = 0; w < loop.plan().tasks[i].waits.size(); ++w, ++wait) {
        EXPECT_GE(stamps.wait_ends[wait], last);
        last = stamps.wait_ends[wait];
      }
      EXPECT_GE(one.begin_ns, last);
      EXPECT_GE(one.end_ns, one.begin_ns);
    }
    EXPECT_GT(wait, 0u);
  }
}

// Scatters rows with valid indices and one invalid index.
TEST(CpuLoopTest, IndexOutOfRangeNamesStageAndValue) {
  for (const int64_t bad : {int64_t{8}, int64_t{-1}}) {
    CpuCase made(2);
    const int table = made.input(ScalarType::f32, {8, 20}, CpuCase::normal());
    const int index = made.input(ScalarType::i64, {5}, CpuCase::integers(0, 7));
    const int out = made.output(ScalarType::f32, {5, 20});
    made.stage(GatherStage{table, {index}, out, 0}, {{table, -1, false}, {index, 0, false}, {out, 0, true}}, 5).origin =
        "embedding (model.py:7)";
    CpuLoop loop(made.plan(2), cpu_compiler());
    made.run(loop);
    const double good = made.get(index, {3});
    made.set(index, {3}, static_cast<double>(bad));
    for (int again = 0; again < 3; ++again) {
      try {
        made.run(loop);
        FAIL();
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::out_of_range);
        for (const std::string& part :
             {"index " + std::to_string(bad), std::string("dimension 0 with size 8"), std::string("model.py:7")})
          EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
      }
    }
    made.set(index, {3}, good);  // a failed step must not affect the next one
    made.run(loop);
    for (int64_t i = 0; i < 5; ++i)
      for (int64_t c = 0; c < 20; ++c)
        EXPECT_EQ(made.get(out, {i, c}), made.get(table, {static_cast<int64_t>(made.get(index, {i})), c}));
  }
}

// Removes the signals from a plan, so that its events never complete.
Plan plan_that_waits_for_ever(Chain& chain) {
  Plan plan = chain.made.plan(2);
  for (Task& task : plan.tasks)
    if (task.worker == 1) task.signals.clear();
  return plan;
}

TEST(CpuLoopTest, DeadlineSaysWhoWaitedForWhom) {
  Chain chain(4);
  CpuLoop loop(plan_that_waits_for_ever(chain), cpu_compiler());
  loop.set_timeout(std::chrono::milliseconds(50));
  for (int again = 0; again < 2; ++again) {
    try {
      chain.made.run(loop);
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::timeout);
      // The error must name the worker of the task that waited.
      const std::regex said(
          "worker ([0-9]+) waited longer than 50 ms before task [0-9]+ "
          "\\(stage[^)]*, worker \\1\\) for task .*event");
      EXPECT_TRUE(std::regex_search(error.what(), said)) << error.what();
    }
  }
}

TEST(CpuLoopTest, CollectivesAreCallsOfTheHost) {
  CpuCase made(4);
  const int input = made.input(ScalarType::f32, {16}, CpuCase::normal());
  const int output = made.output(ScalarType::f32, {16});
  made.stage(CollectiveStage{input, output}, {{input, -1, false}, {output, -1, true}}, 1).node = 5;
  CpuLoop loop(made.plan(1), cpu_compiler());
  EXPECT_THROW(made.run(loop), Error) << "nobody to call";
  struct Host {
    std::thread::id thread;
    int32_t node = -1;
    bool works = true;
  } host;
  loop.set_collective(
      [](void* argument, int32_t node, const void* from, void* to) {
        Host& mine = *static_cast<Host*>(argument);
        mine.thread = std::this_thread::get_id();
        mine.node = node;
        for (int i = 0; i < 16; ++i) static_cast<float*>(to)[i] = 2 * static_cast<const float*>(from)[i];
        return mine.works;
      },
      &host);
  made.run(loop);
  EXPECT_EQ(host.node, 5);
  EXPECT_EQ(host.thread, std::this_thread::get_id());
  for (int64_t i = 0; i < 16; ++i) EXPECT_EQ(made.get(output, {i}), 2 * made.get(input, {i}));
  host.works = false;
  EXPECT_THROW(made.run(loop), Error);
}

#if !defined(__SANITIZE_THREAD__)  // ThreadSanitizer does not follow threads of a forked child
TEST(CpuLoopTest, WorksInAForkedChild) {
  Chain chain(3);
  CpuLoop loop(chain.made.plan(3), cpu_compiler());
  chain.made.run(loop);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    chain.made.run(loop);
    ::_exit(chain.made.get(chain.output, {0, 0}) == chain.made.get(chain.input, {0, 0}) + 3 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  chain.made.run(loop);
}
#endif

TEST(CpuLoopTest, PoolsRunEveryWorkerOnce) {
  struct Counts {
    std::atomic<int> of[8] = {};
  };
  auto body = [](void* argument, int worker) { static_cast<Counts*>(argument)->of[worker].fetch_add(1); };
  for (const int workers : {1, 4, 2, 8, 3}) {
    Counts counts;
    WorkerPool::run(workers, body, &counts);
    for (int w = 0; w < 8; ++w) EXPECT_EQ(counts.of[w], w < workers ? 1 : 0);
  }
  // A worker that calls a loop itself gets another pool.
  static std::atomic<int> inner{0};
  WorkerPool::run(
      2,
      [](void*, int) {
        WorkerPool::run(
            2, [](void*, int) { inner.fetch_add(1); }, nullptr);
      },
      nullptr);
  EXPECT_EQ(inner, 4);
}

// Identical layers share a function. User-provided names go into comments and must not break out of them.
TEST(CpuLoopTest, SourceSharesFunctionsAndNamesOrigins) {
  Chain chain(6);
  chain.made.stages[2].origin = "evil\n#error \\";
  const CpuLoop loop(chain.made.plan(2), cpu_compiler());
  size_t functions = 0;
  for (size_t at = loop.source().find("void rows_"); at != std::string::npos;
       at = loop.source().find("void rows_", at + 1))
    ++functions;
  EXPECT_EQ(functions, 1u);
  EXPECT_NE(loop.source().find("// stage2: evil #error"), std::string::npos) << loop.source();
}

}  // namespace
}  // namespace ark::compiler::test
