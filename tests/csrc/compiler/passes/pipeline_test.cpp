// Tests the pipeline: its table of passes, for which targets each pass runs, and what observers get.
#include "compiler/passes/pipeline.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "compiler/graph/graph_builder.hpp"
#include "compiler/inspect/dump_passes.hpp"
#include "compiler/schedule/targets.hpp"
#include "util/error.hpp"

namespace ark::compiler {
namespace {

Graph small_graph() {
  GraphBuilder builder;
  const int x = builder.input({2, 64}), weights = builder.parameter({64, 64});
  builder.copy_out(builder.pointwise("relu", {builder.matmul(x, weights)}));
  return builder.graph;
}

std::vector<std::string> passes_of(const Target& target, bool multi_step) {
  std::vector<std::string> names;
  make_plan(small_graph(), target, multi_step,
            [&](const Pass& pass, int, const Compilation&) { names.push_back(pass.name); });
  return names;
}

bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

TEST(Pipeline, StagesComeBeforeTheScheduleAndNothingBehindVerify) {
  std::set<std::string> names;
  bool scheduling = false;
  for (const Pass& pass : pipeline()) {
    EXPECT_TRUE(names.insert(pass.name).second) << pass.name << " stands there twice";
    EXPECT_FALSE(scheduling && pass.phase == Pass::Phase::stages) << pass.name;
    scheduling = pass.phase == Pass::Phase::schedule;
    EXPECT_GT(std::string(pass.leaves).size(), 10u) << pass.name;
  }
  EXPECT_STREQ(pipeline().front().name, "make_stages");
  EXPECT_STREQ(pipeline().back().name, "verify");
}

TEST(Pipeline, PassesRunForTheirTargetAndTheirStepsInTheTablesOrder) {
  const auto cpu = passes_of(target_named("cpu", 2), false), gpu = passes_of(gpu_target("sm_90a", 8), false);
  const auto loop = passes_of(gpu_target("sm_90a", 8), true);
  for (const Pass& pass : pipeline()) {
    EXPECT_EQ(has(cpu, pass.name), pass.on == Pass::On::all && pass.steps != Pass::Steps::several) << pass.name;
    EXPECT_EQ(has(gpu, pass.name), pass.steps != Pass::Steps::several) << pass.name;
    EXPECT_EQ(has(loop, pass.name), pass.steps != Pass::Steps::one) << pass.name;
  }
  EXPECT_FALSE(has(gpu, "add_carried_events"));
  EXPECT_FALSE(has(loop, "fuse_all_reduce"));
  std::vector<std::string> order;
  for (const Pass& pass : pipeline())
    if (has(gpu, pass.name)) order.push_back(pass.name);
  EXPECT_EQ(gpu, order);
}

std::string text_of(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

class Dump : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "/ark_dump_XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder); }
  std::string folder;
};

TEST_F(Dump, EachPassLeavesAFile) {
  const Target target = gpu_target("sm_90a", 8);
  make_plan(small_graph(), target, false, pass_dumper(folder + "/made", "ark::net 0"));
  size_t files = 0;
  for (const auto& one : std::filesystem::directory_iterator(folder + "/made")) files += one.is_regular_file() ? 1 : 0;
  EXPECT_EQ(files, passes_of(target, false).size());
  const std::string first = text_of(folder + "/made/ark__net_0.01_make_stages.txt");
  EXPECT_NE(first.find("stage 0: matmul"), std::string::npos) << first;
  EXPECT_NE(first.find("parameter"), std::string::npos) << first;
  EXPECT_EQ(first.find("tasks"), std::string::npos) << first;
  const size_t last = pipeline().size();
  const std::string end = text_of(folder + "/made/ark__net_0." + std::to_string(last) + "_verify.txt");
  EXPECT_NE(end.find(" tasks ("), std::string::npos) << end;
}

TEST_F(Dump, APassThatLeavesBrokenStagesIsNamed) {
  Compilation now;
  now.plan.target = target_named("cpu", 1);
  now.plan.graph = small_graph();
  const Pass& first = pipeline().front();
  first.run(now);
  now.plan.stages.at(0).accesses.at(0).value = 1 << 20;
  try {
    pass_dumper(folder, "net")(first, 1, now);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(error.message().find("after pass make_stages: stage 0"), std::string::npos) << error.message();
  }
}

TEST_F(Dump, AFolderThatCannotBeWrittenIsNamed) {
  std::ofstream(folder + "/file") << "not a folder";
  EXPECT_THROW(make_plan(small_graph(), target_named("cpu", 1), false, pass_dumper(folder + "/file", "net")), Error);
}

}  // namespace
}  // namespace ark::compiler
