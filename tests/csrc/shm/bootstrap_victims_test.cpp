// Tests connect() when a rank is killed or stopped at chosen moments of its start-up, and at random ones.
#include <gtest/gtest.h>

#include <random>

#include "shm/support.hpp"

namespace ark::test {
namespace {

// The point of the start-up at which a rank dies.
struct Moment {
  const char* operation;
  const char* key;
  ErrorKind survivors;  // the error that the others must raise
};

class At : public testing::TestWithParam<Moment> {
 protected:
  static WatchedStore::Hook signal_at(int number) {
    return [number, moment = GetParam()](const char* operation, const std::string& key) {
      if (std::string(operation) == moment.operation && contains(key, moment.key)) ::kill(::getpid(), number);
    };
  }
};

TEST_P(At, AKilledRankIsNamed) {
  for (int victim : {0, 1, 2}) {
    SCOPED_TRACE("victim " + std::to_string(victim));
    const bool is_timeout = GetParam().survivors == ErrorKind::timeout;
    TemporaryDirectory directory;
    Ranks ranks(3, [&](int rank) {
      WatchedStore store(
          directory.path(), rank == victim ? signal_at(SIGKILL) : [](const char*, const std::string&) {});
      return connect_and_talk(store, options_for(rank, 3, milliseconds(is_timeout ? 500 : 20000)));
    });
    const auto& results = ranks.wait();
    ASSERT_EQ(WTERMSIG(results[victim].status), SIGKILL);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      EXPECT_TRUE(contains(results[rank].text, "rank " + std::to_string(victim))) << results[rank].text;
      EXPECT_TRUE(contains(results[rank].text, std::string("Error(") + name_of(GetParam().survivors)))
          << results[rank].text;
      EXPECT_LT(results[rank].seconds, is_timeout ? 5.0 : 2.5);
    }
  }
}

TEST_P(At, AStoppedRankIsNamed) {
  for (int victim : {0, 2}) {
    SCOPED_TRACE("victim " + std::to_string(victim));
    TemporaryDirectory directory;
    Ranks ranks(3, [&](int rank) {
      WatchedStore store(
          directory.path(), rank == victim ? signal_at(SIGSTOP) : [](const char*, const std::string&) {});
      return connect_and_talk(store, options_for(rank, 3, milliseconds(500)));
    });
    const auto& results = ranks.wait(6, victim);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      // The error may come from the other rank, if that one timed out first.
      EXPECT_TRUE(contains(results[rank].text, "rank " + std::to_string(victim) + " did not")) << results[rank].text;
      EXPECT_FALSE(results[rank].killed_late);
      EXPECT_GE(results[rank].seconds, 0.45);
    }
  }
}

TEST_P(At, AStoppedRankThatGoesOnIsNotMissed) {
  for (int victim : {0, 2}) {
    SCOPED_TRACE("victim " + std::to_string(victim));
    TemporaryDirectory directory;
    Ranks ranks(3, [&](int rank) {
      WatchedStore store(
          directory.path(), rank == victim ? signal_at(SIGSTOP) : [](const char*, const std::string&) {});
      return connect_and_talk(store, options_for(rank, 3));
    });
    int status = 0;
    ASSERT_EQ(::waitpid(ranks.pid(victim), &status, WUNTRACED), ranks.pid(victim));
    ASSERT_TRUE(WIFSTOPPED(status));
    std::this_thread::sleep_for(milliseconds(300));
    for (int i = 0; i < 100; ++i) {  // the moment may occur more than once
      ranks.signal(victim, SIGCONT);
      std::this_thread::sleep_for(milliseconds(2));
    }
    expect_all(ranks.wait(), "shared");
  }
}

INSTANTIATE_TEST_SUITE_P(
    Moments, At,
    testing::Values(Moment{"set", "token", ErrorKind::timeout}, Moment{"was set", "token", ErrorKind::timeout},
                    Moment{"set", "record", ErrorKind::timeout}, Moment{"was set", "record", ErrorKind::peer_lost},
                    Moment{"set", "outcome", ErrorKind::peer_lost}),
    [](const auto& info) { return std::string(info.param.operation[0] == 's' ? "Before" : "After") + info.param.key; });

TEST(BootstrapVictims, KilledAtAnyTimeNobodyHangsAndNothingStays) {
  std::mt19937 random(20240611);
  int published = 0;
  for (int i = 0; i < 20; ++i) {
    const int victim = static_cast<int>(random() % 4);
    const auto delay = std::chrono::microseconds(random() % 8000);
    TemporaryDirectory directory;
    Ranks ranks(4, [&](int rank) {
      DirectoryStore store(directory.path());
      ConnectResult result = connect(store, options_for(rank, 4, milliseconds(1200)));
      return result.neighbourhood ? std::string("shared") : "apart: " + result.reason;
    });
    std::this_thread::sleep_for(delay);
    ranks.signal(victim, SIGKILL);
    const auto& results = ranks.wait(10);
    const auto names = published_sockets(directory.path());
    published += static_cast<int>(names.size());
    EXPECT_EQ(count_living(names), 0);
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == victim) continue;
      EXPECT_FALSE(results[rank].killed_late) << "after " << delay.count() << " us";
      const std::string& text = results[rank].text;
      EXPECT_TRUE(text == "shared" || (contains(text, "Error(") && contains(text, "rank " + std::to_string(victim))))
          << text << " after " << delay.count() << " us, victim " << victim;
    }
  }
  EXPECT_GT(published, 0);
}

}  // namespace
}  // namespace ark::test
