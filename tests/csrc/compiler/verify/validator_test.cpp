// Tests that the validator rejects broken plans and accepts only correct ones. Each mutation is applied to many random
// plans. A broken plan that passes must still compute the correct result in many random interleavings.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "compiler/fuse/random_stages.hpp"
#include "compiler/passes/dedupe_prefetch.hpp"
#include "compiler/passes/pipeline.hpp"
#include "compiler/schedule/plan.hpp"
#include "compiler/schedule/simulated_plan.hpp"
#include "compiler/verify/broken_memory.hpp"
#include "compiler/verify/broken_order.hpp"
#include "compiler/verify/broken_tiles.hpp"
#include "compiler/verify/validator.hpp"
#include "util/error.hpp"

namespace ark::compiler {
namespace validator_test {

using test::Mutation;
using test::RandomStages;
using test::SimulatedPlan;
using test::StageGraph;

enum class Steps { single, multi_step, packets };

Plan random_plan(uint64_t seed, Steps steps = Steps::single) {
  StageGraph made = RandomStages(seed).make(static_cast<int>(seed % 13) + 3);
  Target target;
  target.workers = static_cast<int>(seed % 4) + 2;
  target.page_bytes = 256;
  target.packets = steps == Steps::packets;
  if (steps == Steps::multi_step && seed % 2 == 0) test::add_stop(made);
  Plan plan = plan_stages(std::move(made.graph), std::move(made.stages), target, steps == Steps::multi_step);
  dedupe_prefetch(plan);  // as for a GPU
  return plan;
}

// Returns validate()'s error, or an empty string if it accepts.
std::string verdict(const Plan& plan) {
  try {
    validate(plan);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
    EXPECT_FALSE(error.message().empty());
    return error.message();
  }
  return "";
}

bool names_an_offender(const std::string& text) {
  for (const char* word : {"task ", "stage ", "buffer ", "event ", "queue", "ring ", "load "}) {
    if (text.find(word) != std::string::npos) return true;
  }
  return false;
}

void try_mutations(const std::vector<Mutation>& mutations, uint64_t plans, Steps how) {
  const int steps = how == Steps::multi_step ? 3 : 1;
  for (const Mutation& mutation : mutations) {
    int tried = 0, rejected = 0, harmless = 0;
    for (uint64_t seed = 1; seed <= plans; ++seed) {
      std::mt19937_64 random(seed * 977);
      const Plan plan = random_plan(seed, how);
      Plan broken = plan;
      if (!mutation.apply(broken, random)) continue;
      ++tried;
      const std::string said = verdict(broken);
      if (!said.empty()) {
        ++rejected;
        EXPECT_TRUE(names_an_offender(said)) << mutation.name << ": " << said;
        continue;
      }
      ++harmless;
      ASSERT_FALSE(mutation.always) << mutation.name << " accepted, plan " << seed;
      // If it is accepted, no interleaving may change the original plan's result.
      const auto expected = SimulatedPlan(plan).in_program_order(steps);
      SimulatedPlan simulated(broken);
      for (uint64_t run = 0; run < 60; ++run) {
        ASSERT_EQ(simulated.interleaved(seed * 100 + run, steps), expected)
            << mutation.name << " accepted though wrong: plan " << seed << ", run " << run;
      }
    }
    std::printf("  %-45s %4d broken, %4d rejected, %3d harmless\n", mutation.name, tried, rejected, harmless);
    EXPECT_GT(rejected, 10) << mutation.name << " is hardly tried";
  }
}

TEST(ValidatorTest, AcceptsWhatMakePlanMakes) {
  for (uint64_t seed = 1; seed <= 100; ++seed) EXPECT_EQ(verdict(random_plan(seed)), "");
}

TEST(ValidatorTest, AcceptsChainedPlans) {
  for (uint64_t seed = 1; seed <= 100; ++seed) EXPECT_EQ(verdict(random_plan(seed, Steps::multi_step)), "");
}

TEST(ValidatorTest, RejectsBrokenOrder) {
  try_mutations(test::order_mutations(), 100, Steps::single);
}
TEST(ValidatorTest, RejectsBrokenTiles) {
  try_mutations(test::tile_mutations(), 100, Steps::single);
}
TEST(ValidatorTest, RejectsBrokenMemoryAndLoads) {
  try_mutations(test::memory_mutations(), 100, Steps::single);
}

TEST(ValidatorTest, AcceptsPlansWithPackets) {
  for (uint64_t seed = 1; seed <= 100; ++seed) EXPECT_EQ(verdict(random_plan(seed, Steps::packets)), "");
}

TEST(ValidatorTest, RejectsBrokenPackets) {
  try_mutations(test::packet_mutations(), 100, Steps::packets);
}
TEST(ValidatorTest, RejectsBrokenOrderOfSteps) {
  try_mutations(test::step_mutations(), 100, Steps::multi_step);
}

}  // namespace validator_test
}  // namespace ark::compiler
