// Tests the measured costs of this machine: measured once, stored, and measured again if the file is damaged.
#include "compiler/runtime/costs.hpp"
#include "compiler/inspect/json.hpp"
#include "compiler/passes/pipeline.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "compiler/emit/cpu_case.hpp"
#include "compiler/passes/llama_stages.hpp"
#include "jit/temp_folder.hpp"

namespace ark::compiler::test {
namespace {

namespace fs = std::filesystem;

class CostsTest : public ::testing::Test {
 protected:
  // Asks for the costs as a new process would.
  Target costs(const std::string& cxx = {}, int workers = 2) {
    jit::Settings settings = cpu_settings(cache());
    settings.cxx = cxx;
    jit::HostCompiler compiler(settings);
    Target target;
    target.workers = workers;
    return with_measured_costs(target, compiler, [this](const std::string& line) { said_.push_back(line); });
  }
  static std::string cache() { return (folder_->path / "cache").string(); }
  static fs::path file() {
    for (const auto& entry : fs::directory_iterator(cache()))
      if (entry.path().string().ends_with(".costs.json")) return entry.path();
    return {};
  }

  // Shared by all tests, because compiling takes most of the time.
  static void SetUpTestSuite() { folder_ = new jit::TempFolder; }
  static void TearDownTestSuite() { delete folder_; }
  static jit::TempFolder* folder_;
  std::vector<std::string> said_;
};

jit::TempFolder* CostsTest::folder_ = nullptr;

const std::vector<double> figures(const Target& target) {
  return {target.flops_per_us,        target.pointwise_per_us, target.bytes_per_us,
          target.cached_bytes_per_us, target.task_us,          target.wait_us};
}

// Two processes start on a cold cache. This must be the first test.
TEST_F(CostsTest, ProcessesAgree) {
  std::vector<pid_t> children;
  for (const char* name : {"one", "two"}) {
    const pid_t child = ::fork();
    if (child == 0) {
      const Target found = costs();
      folder_->write(name, to_json(Plan{.target = found}));
      ::_exit(found.costs.starts_with("measured 20") ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  EXPECT_FALSE(folder_->read("one").empty());
  EXPECT_EQ(folder_->read("one"), folder_->read("two"));
}

TEST_F(CostsTest, PlausibleAndKept) {
  const Target first = costs();
  EXPECT_EQ(first.costs.substr(0, 11), "measured 20");
  for (const double one : figures(first)) EXPECT_TRUE(std::isfinite(one) && one > 0) << one;
  EXPECT_GT(first.flops_per_us, 100);  // a tenth of a GFLOP/s
  EXPECT_GT(first.bytes_per_us, 10);
  EXPECT_LT(first.task_us, 100);
  EXPECT_LE(first.wait_us, 5);
  struct stat status {};
  ASSERT_EQ(::stat(file().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  EXPECT_EQ(figures(costs()), figures(first));
  EXPECT_TRUE(said_.empty());
}

TEST_F(CostsTest, DamageIsMeasuredAgain) {
  costs();
  const std::string name = "cache/" + file().filename().string();
  const std::string whole = folder_->read(name);
  const auto with = [&](const std::string& what, const std::string& instead) {
    std::string text = whole;
    const size_t at = text.find(what);
    EXPECT_NE(at, std::string::npos);
    return text.replace(at, what.size(), instead);
  };
  for (const std::string& damaged :
       {std::string(), whole.substr(0, whole.size() / 2), whole.substr(0, whole.size() - 3),
        with("\"wait_us\"", "\"\""), with("\"flops_per_us\":", "\"flops_per_us\":-"),
        with("\"task_us\":", "\"task_us\":1e300"), with("\"bytes_per_us\":", "\"bytes_per_us\":null,\"\":"),
        with("\"key\":\"", "\"key\":\"another machine's ")}) {
    folder_->write(name, damaged);
    const Target found = costs();
    EXPECT_EQ(found.costs.substr(0, 11), "measured 20") << damaged;
    const std::string renewed = folder_->read(name);
    EXPECT_NE(renewed, damaged);
    EXPECT_EQ(renewed.size() > 200 && renewed.ends_with("}\n"), true) << renewed;
  }
  EXPECT_TRUE(said_.empty());
}

TEST_F(CostsTest, WithoutThemAsAssumed) {
  const Target target = costs("/no/such/compiler");
  EXPECT_EQ(target.costs, "assumed");
  EXPECT_EQ(figures(target), figures(Target{}));
  ASSERT_EQ(said_.size(), 1u);
  EXPECT_NE(said_[0].find("assumed costs of work: "), std::string::npos);
  // Without a cache folder the costs would change from run to run.
  EXPECT_EQ(with_measured_costs(Target{}, cpu_compiler(), nullptr).costs, "assumed");
}

TEST_F(CostsTest, EqualFiguresEqualPlans) {
  const auto plan = [](const Target& target) {
    StageGraph made = LlamaStages({.layers = 2}).make();
    return to_json(plan_stages(std::move(made.graph), std::move(made.stages), target));
  };
  const Target target = costs();
  EXPECT_EQ(plan(target), plan(costs()));
  Target assumed;
  assumed.workers = 2;
  EXPECT_NE(plan(target), plan(assumed));
}

// This must be the last test, because the others would use the file that it leaves.
TEST_F(CostsTest, OfEachNumberOfWorkersTheirOwn) {
  const auto kept = [] {
    return std::count_if(fs::directory_iterator(cache()), fs::directory_iterator{},
                         [](const auto& entry) { return entry.path().string().ends_with(".costs.json"); });
  };
  costs();
  const auto before = kept();
  costs();
  EXPECT_EQ(kept(), before);
  EXPECT_EQ(costs({}, 3).workers, 3);
  EXPECT_EQ(kept(), before + 1);
}

}  // namespace
}  // namespace ark::compiler::test
