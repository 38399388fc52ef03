// Tests which memory a step uses and how long it lives, on the pretended driver: streams, captures, and graphs that
// outlive the step.
#include "compiler/runtime/step_memory.hpp"

#include <gtest/gtest.h>

#include "cuda/graph_owned.hpp"
#include "support/pretended_driver.hpp"
#include "util/error.hpp"

namespace ark::compiler {
namespace {

using test::pretended;

class StepMemoriesTest : public testing::Test {
 protected:
  StepMemoriesTest() {
    plan_.queues.resize(3);
    plan_.own_bytes = 1000;
    plan_.arena_bytes = 5000;
  }
  ~StepMemoriesTest() override { pretend_capture(0); }

  std::unique_ptr<StepMemories> make(bool one = false) { return std::make_unique<StepMemories>(plan_, 100, 0, one); }
  // Simulates a launch on the stream during the capture with this id.
  static std::weak_ptr<StepMemory> captured(StepMemories& memories, uint64_t id, CUstream stream) {
    pretend_capture(id);
    std::weak_ptr<StepMemory> set = memories.of(stream);
    pretend_capture(0);
    return set;
  }
  static CUstream stream(intptr_t number) { return reinterpret_cast<CUstream>(number); }
  int mapped() const { return pretended().mappings - before_; }

  Plan plan_;
  const int before_ = pretended().mappings;
};

TEST_F(StepMemoriesTest, EveryStreamHasItsOwn) {
  auto memories = make();
  const auto first = memories->of(stream(1)), second = memories->of(stream(2));
  EXPECT_NE(first, second);
  EXPECT_EQ(memories->of(stream(1)), first);
  EXPECT_EQ(mapped(), 2);
  EXPECT_LE(first->own + 3 * first->own_stride, first->scratch);
  EXPECT_LE(first->arena + 5000, first->data.size());
}

TEST_F(StepMemoriesTest, StreamsEndWithTheLoop) {
  auto memories = make();
  memories->of(stream(1));
  EXPECT_EQ(mapped(), 1);
  memories.reset();
  EXPECT_EQ(mapped(), 0);
}

TEST_F(StepMemoriesTest, AGraphOutlivesTheLoop) {
  auto memories = make();
  memories->of(stream(1));
  const auto set = captured(*memories, 7, stream(1)), other = captured(*memories, 8, stream(1));
  EXPECT_EQ(captured(*memories, 7, stream(1)).lock(), set.lock());
  EXPECT_NE(other.lock(), set.lock());
  EXPECT_EQ(mapped(), 3);
  memories.reset();
  EXPECT_EQ(mapped(), 2);
  pretend_graph_end(7);
  EXPECT_FALSE(set.expired());  // the driver's callback must not free memory
  release_ended_graphs();
  EXPECT_TRUE(set.expired());
  EXPECT_FALSE(other.expired());
  EXPECT_EQ(mapped(), 1);
  pretend_graph_end(8);
  release_ended_graphs();
  EXPECT_EQ(mapped(), 0);
}

TEST_F(StepMemoriesTest, GraphsThatAreGoneHoldNothing) {
  auto memories = make();
  for (uint64_t id = 1; id <= 100; ++id) {
    captured(*memories, id, stream(1));
    EXPECT_LE(mapped(), 2);
    pretend_graph_end(id);
  }
}

TEST_F(StepMemoriesTest, APlanWithCollectivesHasOne) {
  for (const bool loop_first : {true, false}) {
    auto memories = make(true);
    const std::weak_ptr<StepMemory> set = memories->of(stream(1));
    EXPECT_EQ(captured(*memories, 7, stream(2)).lock(), set.lock());
    EXPECT_EQ(captured(*memories, 7, stream(2)).lock(), set.lock());
    EXPECT_EQ(mapped(), 1);
    if (loop_first) memories.reset();
    if (!loop_first) pretend_graph_end(7);
    release_ended_graphs();
    EXPECT_EQ(mapped(), 1);
    memories.reset();
    pretend_graph_end(7);
    release_ended_graphs();
    EXPECT_EQ(mapped(), 0);
  }
}

TEST_F(StepMemoriesTest, ARenewedOneBeginsAtZero) {
  auto memories = make(true);
  const std::weak_ptr<StepMemory> before = memories->of(stream(1));
  before.lock()->data.data()[100] = 5;
  memories->renew();
  EXPECT_TRUE(before.expired());
  EXPECT_EQ(memories->of(stream(1))->data.data()[100], 0);
  EXPECT_EQ(mapped(), 1);
}

TEST_F(StepMemoriesTest, AFailureIsTakenOnce) {
  auto memories = make();
  const auto well = memories->of(stream(1)), failed = memories->of(stream(2));
  const auto fail = [](StepMemory& set) {
    set.host_report().value = 42;
    set.host_report().failure = static_cast<uint32_t>(loop::Failure::index_too_large);
    set.data.data()[set.events] = 1;
  };
  EXPECT_FALSE(memories->failure() || memories->take_failure());
  well->data.data()[well->events] = 1;
  fail(*failed);
  EXPECT_EQ(memories->failure()->value, 42);
  EXPECT_EQ(memories->take_failure()->value, 42);
  EXPECT_FALSE(memories->take_failure());
  EXPECT_EQ(failed->data.data()[failed->events], 0);
  EXPECT_EQ(well->data.data()[well->events], 1);
  const auto set = captured(*memories, 7, stream(2)).lock();
  fail(*set);
  memories->of(stream(3));
  EXPECT_TRUE(memories->take_failure());
  pretend_graph_end(7);

  auto group = make(true);
  const auto its = group->of(stream(1));
  fail(*its);
  EXPECT_TRUE(group->take_failure() && group->take_failure());
  EXPECT_EQ(its->data.data()[its->events], 1);
}

TEST_F(StepMemoriesTest, WhatIsNotHeldIsGivenBack) {
  auto memories = make();
  pretend_refuse_to_hold(1);
  EXPECT_THROW(captured(*memories, 7, stream(1)), Error);
  pretend_refuse_to_hold(0);
  pretend_capture(0);
  release_ended_graphs();
  EXPECT_EQ(mapped(), 0);
  EXPECT_FALSE(captured(*memories, 7, stream(1)).expired());
  pretend_graph_end(7);
}

TEST_F(StepMemoriesTest, TooLittleMemorySaysHowMuch) {
  plan_.arena_bytes = int64_t{2} << 30;
  auto memories = make();
  try {
    memories->of(stream(1));
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.message()).find("2048 MB on device 0"), std::string::npos) << error.message();
    EXPECT_NE(error.context().remedy.find("torch.cuda.empty_cache()"), std::string::npos);
  }
}

TEST_F(StepMemoriesTest, GraphsEndWhileOthersLaunch) {
  auto memories = make();
  for (uint64_t id = 1; id <= 40; ++id) captured(*memories, id, stream(1));
  std::thread ends([] {
    for (uint64_t id = 1; id <= 40; ++id) pretend_graph_end(id);
  });
  std::vector<std::thread> threads;
  for (int number = 0; number < 3; ++number)
    threads.emplace_back([&memories, number] {
      for (int i = 0; i < 40; ++i) {
        EXPECT_NE(memories->of(stream(100 * number + i)), nullptr);
        EXPECT_FALSE(memories->take_failure());
      }
    });
  ends.join();
  for (std::thread& thread : threads) thread.join();
  memories.reset();
  EXPECT_EQ(mapped(), 0);
}

}  // namespace
}  // namespace ark::compiler
