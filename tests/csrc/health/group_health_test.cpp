// Tests whom a rank blames and what its peers are told, with control blocks in place of other ranks.
#include "health/group_health.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace ark::test {
namespace {

using std::chrono::milliseconds;

class GroupHealthTest : public testing::Test {
 protected:
  static constexpr int kRanks = 4;

  std::unique_ptr<GroupHealth> health_of(int rank) {
    std::vector<ControlBlock*> control;
    for (ControlBlock& block : blocks_) control.push_back(&block);
    return std::make_unique<GroupHealth>(rank, control, nullptr);
  }
  void waits_on(int rank, int peer) { protocol::store_relaxed(blocks_[rank].waiting_on, int64_t{peer} + 1); }

  // Returns `look`'s result while these ranks are awake. A rank that sleeps on a counter beats at every time slice.
  template <class Look>
  auto while_awake(std::vector<int> ranks, Look look) {
    std::atomic<bool> over{false};
    std::thread others([&] {
      while (!over) {
        for (const int rank : ranks) protocol::add_relaxed(blocks_[rank].beat, uint64_t{1});
        std::this_thread::sleep_for(milliseconds(5));
      }
    });
    const auto found = look();
    over = true;
    others.join();
    return found;
  }

  ControlBlock blocks_[kRanks] = {};
};

TEST_F(GroupHealthTest, WhoWaitsItselfIsNotToBlame) {
  const auto health = health_of(0);
  waits_on(0, 1), waits_on(1, 2), waits_on(2, 3);
  EXPECT_EQ(while_awake({1, 2}, [&] { return health->find_culprit(1); }), 3);
  EXPECT_EQ(while_awake({1, 2}, [&] { return health->find_culprit(3); }), 3);
}

TEST_F(GroupHealthTest, WhoWasStoppedInAWaitIsToBlame) {
  const auto health = health_of(0);
  waits_on(0, 1), waits_on(1, 2), waits_on(2, 3);
  EXPECT_EQ(while_awake({1}, [&] { return health->find_culprit(1); }), 2) << "rank 2 does not beat";
}

TEST_F(GroupHealthTest, WhoWaitsForThisRankIsTheLast) {
  const auto health = health_of(0);
  waits_on(0, 1), waits_on(1, 0);
  EXPECT_EQ(while_awake({1}, [&] { return health->find_culprit(1); }), 1);
  waits_on(1, 2), waits_on(2, 1);  // a cycle must still give an answer
  const int found = while_awake({1, 2}, [&] { return health->find_culprit(1); });
  EXPECT_TRUE(found == 1 || found == 2) << found;
  waits_on(1, 77);  // nonsense in a peer's memory
  EXPECT_EQ(while_awake({1}, [&] { return health->find_culprit(1); }), 1);
}

TEST_F(GroupHealthTest, ATimeoutNamesTheOneThatIsLate) {
  const auto health = health_of(0);
  waits_on(0, 1), waits_on(1, 2);
  blocks_[2].enqueued = 4, blocks_[2].completed = 3, blocks_[0].enqueued = 5;
  const OperationContext late{"all_reduce", 5, Clock::now(), milliseconds(20)};
  const auto alarm = health->alarm(late, 1);
  ASSERT_TRUE(alarm);
  ASSERT_EQ(alarm->kind, GroupHealth::Alarm::late);
  const Error error = while_awake({1}, [&] {
    try {
      health->raise(*alarm, late, 1);
    } catch (const Error& raised) {
      return raised;
    }
  });
  EXPECT_EQ(error.kind(), ErrorKind::timeout);
  EXPECT_EQ(error.context().rank, 0);
  EXPECT_EQ(error.context().peer, 2);
  EXPECT_NE(std::string(error.what()).find("waiting for rank 2, which has issued 4 and completed 3"), std::string::npos)
      << error.what();
}

// A rank that waits for another node's rank gets time to find out why. It is blamed only if it does not.
TEST_F(GroupHealthTest, WhoWaitsOutsideIsHeardFirst) {
  const OperationContext late{"all_reduce", 5, Clock::now(), milliseconds(20)};
  protocol::store_relaxed(blocks_[1].waiting_on, kWaitsOutside);
  const auto told = [&](GroupHealth& health) {
    try {
      health.raise({GroupHealth::Alarm::late, 1}, late, 1);
    } catch (const Error& raised) {
      return raised;
    }
  };
  const auto health = health_of(0), outside = health_of(1);
  health->set_patience_outside(std::chrono::seconds(20));
  std::thread finds([&] {
    std::this_thread::sleep_for(milliseconds(300));  // longer than the search for the culprit
    outside->fail(Error(ErrorKind::timeout, "node 1 is silent", ErrorContext{1, 7, "all_reduce", 5, ""}));
  });
  const Error heard = told(*health);
  finds.join();
  EXPECT_NE(std::string(heard.what()).find("node 1 is silent"), std::string::npos) << heard.what();

  const auto impatient = health_of(2);
  blocks_[1].abort_state = kAbortNone, blocks_[0].abort_state = kAbortNone;
  impatient->set_patience_outside(milliseconds(50));
  EXPECT_EQ(told(*impatient).context().peer, 1);
  EXPECT_EQ(impatient->progress()[1].waiting_on, -1);
}

TEST_F(GroupHealthTest, PeersHearWhatFailedAndWhomItBlames) {
  const auto first = health_of(1), second = health_of(2);
  const OperationContext here{"broadcast", 9, Clock::time_point::max(), milliseconds(0)};
  EXPECT_NO_THROW(second->check_alive(here));
  first->fail(Error(ErrorKind::peer_lost, "it is gone", ErrorContext{1, 3, "reduce", 8, ""}));
  first->fail(Error(ErrorKind::aborted, "too late to be the reason", ErrorContext{1, 0, "", 0, ""}));
  try {
    second->check_alive(here);
    ADD_FAILURE() << "nothing was raised";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::peer_lost);
    EXPECT_EQ(error.context().rank, 2);
    EXPECT_EQ(error.context().peer, 3);
    EXPECT_NE(std::string(error.what()).find("rank 1 reported in reduce #8"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("it is gone"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(second->failed());
}

}  // namespace
}  // namespace ark::test
