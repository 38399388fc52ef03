// connect() when processes die, stop, never come, or run out of descriptors or memory meanwhile.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <random>

#include "memory/support.hpp"

namespace ark::test {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != text.npos;
}

// Where in its start-up a rank meets its end.
struct Moment {
  const char* operation;
  const char* key;
  ErrorKind survivors;  // what the others must raise
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
      // Whoever times out first may be the one that the other one hears of.
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
    for (int i = 0; i < 100; ++i) {  // the moment may come more than once
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

TEST(BootstrapFailures, KilledAtAnyTimeNobodyHangsAndNothingStays) {
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

TEST(BootstrapFailures, MissingRanksAreNamed) {
  TemporaryDirectory directory;
  Ranks ranks(4, [&](int rank) {
    if (rank == 1 || rank == 3) return std::string("stays away");
    DirectoryStore store(directory.path());
    return connect_and_talk(store, options_for(rank, 4, milliseconds(400)));
  });
  const auto& results = ranks.wait();
  EXPECT_TRUE(contains(results[0].text, "Error(timeout")) << results[0].text;
  EXPECT_TRUE(contains(results[0].text, "ranks 1 and 3 did not join the group within 400 ms")) << results[0].text;
  EXPECT_TRUE(contains(results[2].text, "ranks 1 and 3 did not join")) << results[2].text;
}

TEST(BootstrapFailures, RankZeroMissing) {
  TemporaryDirectory directory;
  Ranks ranks(2, [&](int rank) {
    if (rank == 0) return std::string("stays away");
    DirectoryStore store(directory.path());
    return connect_and_talk(store, options_for(rank, 2, milliseconds(400)));
  });
  EXPECT_TRUE(contains(ranks.wait()[1].text, "Error(timeout, peer 0)")) << ranks.wait()[1].text;
}

TEST(BootstrapFailures, InterruptionEndsItEverywhere) {
  TemporaryDirectory directory;
  Ranks ranks(3, [&](int rank) {
    WatchedStore store(directory.path(), [&](const char* operation, const std::string& key) {
      if (rank == 2 && std::string(operation) == "set" && contains(key, "record")) ::pause();
    });
    ConnectOptions options = options_for(rank, 3);
    const auto start = Clock::now();
    if (rank == 0) options.interrupted = [start] { return seconds_since(start) > 0.3; };
    return connect_and_talk(store, options);
  });
  const auto& results = ranks.wait(5, 2);
  EXPECT_TRUE(contains(results[0].text, "Error(aborted")) << results[0].text;
  EXPECT_LT(results[0].seconds, 1.0);
  EXPECT_TRUE(contains(results[1].text, "because rank 0 failed")) << results[1].text;
  EXPECT_LT(results[1].seconds, 2.0);
}

TEST(BootstrapFailures, TheStoreGoesAway) {
  TemporaryDirectory directory;
  Ranks ranks(2, [&](int rank) {
    DirectoryStore store(directory.path());
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(200));
      std::filesystem::remove_all(directory.path());
      return std::string("took the store away");
    }
    return connect_and_talk(store, options_for(rank, 2));
  });
  const auto& results = ranks.wait();
  EXPECT_TRUE(contains(results[0].text, "Error(system")) << results[0].text;
  EXPECT_LT(results[0].seconds, 2.0);
}

void limit(__rlimit_resource resource, rlim_t value) {
  rlimit limits{};
  ::getrlimit(resource, &limits);
  limits.rlim_cur = value;
  if (::setrlimit(resource, &limits) != 0) throw system_error("setrlimit", errno);
}

int count_open_files() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count - 1;  // the directory itself
}

// A store which may open files although the rest of the process may not.
class Limited : public KeyValueStore {
  template <typename Work>
  auto with_files(Work work) {
    struct Lifted {
      explicit Lifted(rlim_t few) : few(few) { limit(RLIMIT_NOFILE, 1000); }
      ~Lifted() { limit(RLIMIT_NOFILE, few); }
      rlim_t few;
    } lifted(few_);
    return work();
  }

 public:
  Limited(KeyValueStore& inner, rlim_t few) : inner_(inner), few_(few) { limit(RLIMIT_NOFILE, few_); }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    with_files([&] { inner_.set(key, value); });
  }
  std::vector<uint8_t> get(const std::string& key, milliseconds timeout) override {
    return with_files([&] { return inner_.get(key, timeout); });
  }
  std::optional<std::vector<uint8_t>> find(const std::string& key) override {
    return with_files([&] { return inner_.find(key); });
  }

 private:
  KeyValueStore& inner_;
  const rlim_t few_;
};

// Whatever the number of descriptors left, all ranks come to one end: shared, apart, or an error.
TEST(BootstrapFailures, RunningOutOfDescriptors) {
  bool shared = false, not_shared = false;
  for (int left = 0; left < 14; ++left) {
    SCOPED_TRACE(std::to_string(left) + " descriptors left on rank 1");
    TemporaryDirectory directory;
    Ranks ranks(3, [&](int rank) {
      if (rank == 1) {
        DirectoryStore store(directory.path());
        Limited limited(store, static_cast<rlim_t>(count_open_files() + left));
        return connect_and_talk(limited, options_for(rank, 3, milliseconds(5000)), Identity::of_this_process());
      }
      DirectoryStore store(directory.path());
      return connect_and_talk(store, options_for(rank, 3, milliseconds(5000)));
    });
    const auto& results = ranks.wait();
    const std::string& text = results[0].text;
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_FALSE(results[rank].killed_late);
      EXPECT_LT(results[rank].seconds, 3.0);
      EXPECT_EQ(results[rank].text.substr(0, 5), text.substr(0, 5)) << results[rank].text << "\n" << text;
    }
    if (text == "shared")
      shared = true;
    else
      not_shared = true;
    EXPECT_TRUE(text == "shared" || contains(text, "open files") || contains(text, "files open")) << text;
  }
  EXPECT_TRUE(shared);
  EXPECT_TRUE(not_shared);
}

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kCanLimitMemory = false;  // their shadow memory is larger than any limit
#else
constexpr bool kCanLimitMemory = true;
#endif

rlim_t address_space_in_use() {
  std::ifstream status("/proc/self/statm");
  rlim_t pages = 0;
  status >> pages;
  return pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE));
}

TEST(BootstrapFailures, NoMemoryForItsOwnSegment) {
  if (!kCanLimitMemory) GTEST_SKIP() << "sanitizer";
  TemporaryDirectory directory;
  Ranks ranks(3, [&](int rank) {
    DirectoryStore store(directory.path());
    ConnectOptions options = options_for(rank, 3);
    options.segment_bytes = size_t{1} << 30;
    if (rank == 1) limit(RLIMIT_AS, address_space_in_use() + (size_t{1} << 28));
    return connect_and_talk(store, options);
  });
  const auto& results = ranks.wait();
  EXPECT_TRUE(contains(results[1].text, "Error(system, peer -1)")) << results[1].text;
  EXPECT_TRUE(contains(results[1].text, "1073741824 bytes: Cannot allocate memory. Free memory")) << results[1].text;
  for (int rank : {0, 2}) {
    EXPECT_TRUE(contains(results[rank].text, "because rank 1 failed: ark: cannot map")) << results[rank].text;
    EXPECT_LT(results[rank].seconds, 2.0);
  }
}

TEST(BootstrapFailures, NoAddressesForThePeersSegments) {
  if (!kCanLimitMemory) GTEST_SKIP() << "sanitizer";
  TemporaryDirectory directory;
  Ranks ranks(3, [&](int rank) {
    DirectoryStore store(directory.path());
    ConnectOptions options = options_for(rank, 3);
    options.segment_bytes = size_t{1} << 30;
    if (rank == 1) limit(RLIMIT_AS, address_space_in_use() + (size_t{3} << 29));
    return connect_and_talk(store, options);
  });
  // A shortage of one process, and no reason for all to go on without sharing as if they were on several machines.
  const auto& results = ranks.wait();
  EXPECT_TRUE(contains(results[1].text, "Error(system, peer -1)")) << results[1].text;
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(contains(results[rank].text, "1073741824 bytes: Cannot allocate memory. Free memory"))
        << results[rank].text;
    EXPECT_EQ(contains(results[rank].text, "because rank 1 failed: ark: cannot map"), rank != 1) << results[rank].text;
    EXPECT_LT(results[rank].seconds, 2.0);
  }
}

}  // namespace
}  // namespace ark::test
