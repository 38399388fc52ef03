// Tests connect() when ranks never come, give up, lose the store, or run out of descriptors or memory.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "shm/support.hpp"

namespace ark::test {
namespace {

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
  EXPECT_TRUE(contains(results[1].text, "Error(aborted, peer 0)")) << results[1].text;
  EXPECT_TRUE(contains(results[1].text, "because rank 0 failed")) << results[1].text;
  EXPECT_LT(results[1].seconds, 2.0);
}

// A rank that gives up blames the rank that it waited for, and so do all that are told.
TEST(BootstrapFailures, WhoGivesUpPassesTheBlameOn) {
  TemporaryDirectory directory;
  Ranks ranks(3, [&](int rank) {
    WatchedStore store(directory.path(), [&](const char* operation, const std::string& key) {
      if (rank == 2 && std::string(operation) == "set" && contains(key, "record")) ::pause();
    });
    return connect_and_talk(store, options_for(rank, 3, milliseconds(rank == 0 ? 500 : 20000)));
  });
  const auto& results = ranks.wait(5, 2);
  EXPECT_TRUE(contains(results[0].text, "Error(timeout, peer 2)")) << results[0].text;
  EXPECT_TRUE(contains(results[1].text, "Error(timeout, peer 2)")) << results[1].text;
  EXPECT_TRUE(contains(results[1].text, "because rank 0 failed")) << results[1].text;
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
  return count - 1;  // minus the directory itself
}

// A store that may open files even when the rest of the process may not.
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

// For any number of remaining descriptors, all ranks agree: shared, apart, or an error.
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
constexpr bool kCanLimitMemory = false;  // sanitizers' shadow memory exceeds any limit
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
    EXPECT_TRUE(contains(results[rank].text, "Error(system, peer 1)")) << results[rank].text;
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
  // One process is short of memory. That is no reason for all to continue without sharing, as if on several machines.
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
