// Tests the watch between host and device, with the host writing the device's words.
#include "health/device_watch.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <memory>
#include <thread>

#include "protocol/atomics.hpp"

namespace ark {
namespace {

using std::chrono::milliseconds;

class DeviceWatchTest : public testing::Test {
 protected:
  // Rank 0 of `size`. ends[r] is rank r's end of the socket between them.
  void make(int size) {
    blocks = std::make_unique<ControlBlock[]>(size);
    std::vector<ControlBlock*> control;
    std::vector<UniqueFd> connections(size);
    ends.resize(size);
    for (int r = 0; r < size; ++r) {
      control.push_back(&blocks[r]);
      if (r == 0) continue;
      int pair[2];
      ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
      connections[r] = UniqueFd(pair[0]);
      ends[r] = UniqueFd(pair[1]);
    }
    health = std::make_unique<GroupHealth>(0, control, std::make_unique<PeerMonitor>(0, std::move(connections)));
    watch = std::make_unique<DeviceWatch>(
        *health, &status, [this](const Error&) { ++said; }, [this](const Error&) { ++noted; });
  }

  bool aborts_within(milliseconds bound) {
    const auto until = Clock::now() + bound;
    while (protocol::load_acquire(status.abort) == 0) {
      if (Clock::now() > until) return false;
      std::this_thread::sleep_for(milliseconds(5));
    }
    return true;
  }

  std::string failure() {
    try {
      watch->check({"all_reduce", 7, Clock::time_point::max(), milliseconds(0)});
    } catch (const Error& error) {
      return error.what();
    }
    return "none";
  }

  std::unique_ptr<ControlBlock[]> blocks;
  std::vector<UniqueFd> ends;
  device::GroupStatus status{};
  std::atomic<int> said{0}, noted{0};
  std::unique_ptr<GroupHealth> health;
  std::unique_ptr<DeviceWatch> watch;
};

TEST_F(DeviceWatchTest, ALostPeerEndsKernels) {
  make(3);
  EXPECT_EQ(failure(), "none");
  ends[2].reset();
  EXPECT_TRUE(aborts_within(milliseconds(2000)));
  EXPECT_NE(failure().find("rank 2 is gone"), std::string::npos) << failure();
  EXPECT_EQ(said, 0);
}

TEST_F(DeviceWatchTest, APeerThatLeftIsToldToTheDevice) {
  make(3);
  ASSERT_EQ(::send(ends[1].get(), "G", 1, 0), 1);
  const auto until = Clock::now() + milliseconds(2000);
  while (protocol::load_relaxed(status.departed) == 0 && Clock::now() < until)
    std::this_thread::sleep_for(milliseconds(5));
  EXPECT_EQ(protocol::load_relaxed(status.departed), 2u);
  EXPECT_EQ(protocol::load_acquire(status.abort), 0u);
  EXPECT_EQ(failure(), "none");
}

TEST_F(DeviceWatchTest, AKernelThatGaveUpFailsTheGroup) {
  make(2);
  status.peer = 1;
  protocol::store_release(status.gave_up, uint32_t{1});
  const std::string text = failure();
  EXPECT_NE(text.find("waited for rank 1"), std::string::npos) << text;
  EXPECT_EQ(blocks[0].abort_state, kAbortSet);  // this tells the peers
  EXPECT_EQ(noted, 1);
  watch.reset();
  EXPECT_EQ(said, 1);
}

TEST_F(DeviceWatchTest, APeersFailureEndsKernels) {
  make(2);
  blocks[1].abort.culprit = 0;
  blocks[1].abort.kind = static_cast<uint32_t>(ErrorKind::aborted);
  protocol::store_release(blocks[1].abort_state, kAbortSet);
  EXPECT_TRUE(aborts_within(milliseconds(2000)));
  EXPECT_NE(failure().find("rank 1 reported"), std::string::npos) << failure();
}

TEST_F(DeviceWatchTest, CopyEnginesThatAreStuckAreReleasedAgainAndAgain) {
  make(2);
  device::EngineStatus engine{1, 0};
  std::atomic<int> releases{0};
  watch->watch_engine(
      &engine, [&] { ++releases; }, [] { return EngineDiagnosis{}; });
  watch->engine_used(milliseconds(300));
  std::this_thread::sleep_for(milliseconds(250));
  protocol::store_relaxed(engine.progress, uint32_t{1});  // slow, but not stuck
  std::this_thread::sleep_for(milliseconds(250));
  EXPECT_EQ(releases, 0);
  EXPECT_TRUE(aborts_within(milliseconds(3000)));
  const auto until = Clock::now() + milliseconds(2000);
  while (releases < 2 && Clock::now() < until) std::this_thread::sleep_for(milliseconds(5));
  EXPECT_GE(releases, 2);
  EXPECT_NE(failure().find("copy engines of this rank waited for rank 1"), std::string::npos) << failure();
  watch->forget_engine();
}

// The log may block in the driver while a user's copy waits for what this release ends.
TEST_F(DeviceWatchTest, CopyEnginesAreReleasedWhileTheLogIsHeldUp) {
  make(2);
  std::atomic<bool> held_up{true}, over{false};
  std::atomic<int> releases{0};
  watch = std::make_unique<DeviceWatch>(*health, &status, [&](const Error&) {
    const auto until = Clock::now() + std::chrono::seconds(20);
    while (held_up && Clock::now() < until) std::this_thread::sleep_for(milliseconds(5));
    over = true;
  });
  device::EngineStatus engine{1, 0};
  watch->watch_engine(
      &engine, [&] { ++releases; }, [] { return EngineDiagnosis{}; });
  watch->engine_used(milliseconds(300));
  const auto until = Clock::now() + std::chrono::seconds(10);
  while (releases < 3 && Clock::now() < until) std::this_thread::sleep_for(milliseconds(5));
  EXPECT_GE(releases, 3);
  EXPECT_FALSE(over);
  EXPECT_NE(failure().find("copy engines of this rank waited for rank 1"), std::string::npos) << failure();
  watch->forget_engine();
  held_up = false;
  watch.reset();
  EXPECT_TRUE(over);
}

TEST_F(DeviceWatchTest, WhoeverElseCarriesTheGroupIsToldOfItsFailure) {
  make(2);
  std::atomic<int> told{0};
  watch->when_failed([&] { ++told; });
  std::this_thread::sleep_for(milliseconds(250));
  EXPECT_EQ(told, 0);
  ends[1].reset();
  const auto until = Clock::now() + milliseconds(2000);
  while (told == 0 && Clock::now() < until) std::this_thread::sleep_for(milliseconds(5));
  EXPECT_GE(told, 1);
  watch.reset();
}

TEST_F(DeviceWatchTest, CopyEnginesThatBeginAnewAreNotStuck) {
  make(3);
  device::EngineStatus engine{1, 0};
  watch->watch_engine(
      &engine, [] {},
      [] {
        return EngineDiagnosis{2, false};
      });
  watch->engine_used(milliseconds(300));
  for (int i = 0; i < 12; ++i) {  // like the copies of a call
    std::this_thread::sleep_for(milliseconds(50));
    protocol::store_relaxed(engine.beat, protocol::load_relaxed(engine.clock));
  }
  EXPECT_EQ(protocol::load_acquire(status.abort), 0u);
  EXPECT_TRUE(aborts_within(milliseconds(3000)));
  EXPECT_NE(failure().find("copy engines of this rank waited for rank 2"), std::string::npos) << failure();
  watch->forget_engine();
}

TEST_F(DeviceWatchTest, PlacesThatDoNotBelongTogetherFailTheGroupBeforeItsTimeout) {
  make(3);
  device::EngineStatus engine{1, 0};
  watch->watch_engine(
      &engine, [] {},
      [] {
        return EngineDiagnosis{1, true};
      });
  watch->engine_used(milliseconds(60'000));
  std::this_thread::sleep_for(milliseconds(350));
  EXPECT_EQ(failure(), "none") << "nobody is asked";
  protocol::store_relaxed(engine.expected, uint32_t{2});
  EXPECT_TRUE(aborts_within(milliseconds(3000)));
  EXPECT_NE(failure().find("rank 1 passed another place"), std::string::npos) << failure();
  watch->forget_engine();
}

TEST_F(DeviceWatchTest, CopyEnginesDoNotWaitForAPeerThatLeft) {
  for (int size : {2, 3}) {
    protocol::store_relaxed(status.abort, uint32_t{0});
    make(size);
    device::EngineStatus engine{1, 0};
    watch->watch_engine(
        &engine, [] {},
        [] {
          return EngineDiagnosis{1, false};
        });
    watch->engine_used(milliseconds(60'000));
    protocol::store_relaxed(blocks[0].enqueued, uint64_t{3});
    protocol::store_relaxed(blocks[1].enqueued, uint64_t{3});
    ASSERT_EQ(::send(ends[1].get(), "G", 1, 0), 1);
    std::this_thread::sleep_for(milliseconds(1500));
    EXPECT_EQ(failure(), "none") << "it took part in all: the engines wait for SMs";
    protocol::store_relaxed(blocks[0].enqueued, uint64_t{4});
    EXPECT_TRUE(aborts_within(milliseconds(5000)));
    EXPECT_NE(failure().find("rank 1 left the group"), std::string::npos) << failure();
    watch->forget_engine();
    watch.reset();
    EXPECT_EQ(said.exchange(0), 1);
  }
}

TEST_F(DeviceWatchTest, CopyEnginesWaitForThoseWhoStay) {
  make(3);
  device::EngineStatus engine{1, 0};
  watch->watch_engine(
      &engine, [] {},
      [] {
        return EngineDiagnosis{2, false};
      });
  watch->engine_used(milliseconds(60'000));
  protocol::store_relaxed(blocks[0].enqueued, uint64_t{4});
  ASSERT_EQ(::send(ends[1].get(), "G", 1, 0), 1);
  std::this_thread::sleep_for(milliseconds(1500));
  EXPECT_EQ(failure(), "none");
  watch->forget_engine();
}

TEST_F(DeviceWatchTest, TheLongestLimitCountsWhileCopyEnginesAreBusy) {
  make(2);
  device::EngineStatus engine{1, 0};
  watch->watch_engine(
      &engine, [] {}, [] { return EngineDiagnosis{}; });
  watch->engine_used(milliseconds(60'000));
  watch->engine_used(milliseconds(200));
  std::this_thread::sleep_for(milliseconds(900));
  EXPECT_EQ(failure(), "none");
  protocol::store_relaxed(engine.busy, uint32_t{0});
  std::this_thread::sleep_for(milliseconds(400));
  protocol::store_relaxed(engine.busy, uint32_t{1});
  EXPECT_TRUE(aborts_within(milliseconds(5000)));
  watch->forget_engine();
}

TEST_F(DeviceWatchTest, NothingIsWatchedAfterTheEnd) {
  make(2);
  watch.reset();
  ends[1].reset();
  std::this_thread::sleep_for(milliseconds(250));
  EXPECT_EQ(protocol::load_acquire(status.abort), 0u);
  EXPECT_FALSE(health->failed());
}

}  // namespace
}  // namespace ark
