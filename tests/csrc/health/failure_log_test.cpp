// Tests failures reported by threads: what is waited for, and how long.
#include "health/failure_log.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <future>

namespace ark {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

Error failure(const char* what) {
  return Error(ErrorKind::timeout, what);
}

TEST(FailureLog, WhatIsNotToldInTimeIsNamed) {
  std::promise<void> release;
  std::atomic<int> told{0};
  {
    FailureLog log([&, released = release.get_future().share()](const Error&) {
      released.wait();
      ++told;
    });
    EXPECT_EQ(log.wait_told(Clock::now()), std::nullopt);
    log.add(failure("rank 3 is late"));
    EXPECT_EQ(log.wait_told(Clock::now()), std::nullopt);  // not started
    log.start();
    const auto began = Clock::now();
    const auto left = log.wait_told(began + milliseconds(30));
    EXPECT_GE(Clock::now() - began, milliseconds(30));
    ASSERT_TRUE(left.has_value());
    EXPECT_NE(left->find("rank 3 is late"), std::string::npos) << *left;
    release.set_value();
    EXPECT_EQ(log.wait_told(Clock::now() + std::chrono::seconds(20)), std::nullopt);
    EXPECT_EQ(told, 1);
    log.add(failure("untold when it ends"));
  }
  EXPECT_EQ(told, 2);
}

TEST(FailureLog, OfSeveralTheFirstThatIsNotTold) {
  std::promise<void> release;
  FailureLog log([released = release.get_future().share()](const Error& error) {
    if (std::string(error.what()).find("second") != std::string::npos) released.wait();
  });
  for (const char* one : {"first", "second", "third"}) log.add(failure(one));
  log.start();
  std::string left = "nothing yet";
  for (const auto until = Clock::now() + std::chrono::seconds(20);
       left.find("second") == std::string::npos && Clock::now() < until;)
    left = log.wait_told(Clock::now() + milliseconds(5)).value_or("nothing");
  EXPECT_NE(left.find("second"), std::string::npos) << left;
  release.set_value();
  EXPECT_EQ(log.wait_told(Clock::now() + std::chrono::seconds(20)), std::nullopt);
}

}  // namespace
}  // namespace ark
