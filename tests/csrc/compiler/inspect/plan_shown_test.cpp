// Tests the readable form of a plan.
#include <gtest/gtest.h>

#include <string>

#include "compiler/inspect/json.hpp"
#include "compiler/passes/llama_stages.hpp"
#include "compiler/passes/pipeline.hpp"
#include "compiler/schedule/plan.hpp"

namespace ark::compiler {
namespace {

Plan one_layer(size_t stage, const std::string& origin) {
  test::LlamaSizes sizes;
  sizes.layers = 1;
  test::StageGraph made = test::LlamaStages(sizes).make();
  made.stages[stage].origin = origin;
  Target target;
  target.workers = 2;
  target.bytes_per_us = 5e3;
  return plan_stages(std::move(made.graph), std::move(made.stages), target);
}

TEST(PlanShownTest, JsonTellsTheWholePlan) {
  const Plan plan = one_layer(0, "a \"quoted\" name\n");
  const std::string json = to_json(plan);
  for (const char* part : {"\"target\":{\"name\":\"cpu\"", "\"bytes_in_flight\":32768", "a \\\"quoted\\\" name\\u000a",
                           "\"kind\":\"attention\"", "\"threshold\":2", "\"arena\":\"own\"", "\"loads\":[{\"task\":",
                           "\"eager_peak_bytes\":", "\"replica\":true", "\"parameter\":true"}) {
    EXPECT_NE(json.find(part), std::string::npos) << part;
  }
  int depth = 0;
  bool quoted = false;
  for (size_t at = 0; at < json.size(); ++at) {
    if (json[at] == '"' && (at == 0 || json[at - 1] != '\\')) quoted = !quoted;
    if (!quoted) depth += json[at] == '{' || json[at] == '[' ? 1 : json[at] == '}' || json[at] == ']' ? -1 : 0;
    ASSERT_GE(depth, 0);
  }
  EXPECT_EQ(depth, 0);
}

}  // namespace
}  // namespace ark::compiler
