// Tests how long a host waits for a launch of many steps.
#include "compiler/runtime/launch_wait.hpp"

#include <gtest/gtest.h>

namespace ark::compiler {
namespace {

using std::chrono::hours;
using std::chrono::seconds;
using Next = LaunchWait::Next;

const LaunchWait::Time kBegin = LaunchWait::Time(hours(7));

TEST(LaunchWait, AsManyStepsHaveAsManyLimitsThenItIsStopped) {
  LaunchWait wait(kBegin, 30, seconds(10));
  EXPECT_EQ(wait.limit(), seconds(300));
  EXPECT_EQ(wait.at(kBegin + seconds(299), false), Next::wait);
  EXPECT_FALSE(wait.overdue());
  EXPECT_EQ(wait.at(kBegin + seconds(300), false), Next::stop);
  EXPECT_TRUE(wait.overdue());
  EXPECT_EQ(wait.at(kBegin + seconds(301), true), Next::wait);
  EXPECT_EQ(wait.at(kBegin + seconds(320), true), Next::wait);
  EXPECT_EQ(wait.at(kBegin + seconds(321), true), Next::give_up);
}

TEST(LaunchWait, AUserWhoInterruptsWaitsForOneStepAtMost) {
  LaunchWait wait(kBegin, 1'000'000, seconds(10));
  EXPECT_EQ(wait.at(kBegin + seconds(5), true), Next::wait);
  EXPECT_EQ(wait.at(kBegin + seconds(24), true), Next::wait);
  EXPECT_FALSE(wait.overdue());
  EXPECT_EQ(wait.at(kBegin + seconds(25), true), Next::give_up);
  EXPECT_TRUE(wait.overdue());
}

TEST(LaunchWait, NoLimitIsNone) {
  LaunchWait wait(kBegin, 3, seconds(0));
  EXPECT_EQ(wait.at(kBegin + hours(100'000), false), Next::wait);
  EXPECT_EQ(wait.at(kBegin + hours(200'000), true), Next::wait);
}

TEST(LaunchWait, ManyStepsOfALongLimitDoNotOverflow) {
  LaunchWait wait(kBegin, 4'000'000'000u, hours(24 * 365));
  EXPECT_GT(wait.limit(), hours(24 * 365 * 50));
  EXPECT_EQ(wait.at(kBegin + hours(1000), false), Next::wait);
}

}  // namespace
}  // namespace ark::compiler
