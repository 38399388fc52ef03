// Tests connect() between real processes: every group size, every reason not to share, and leftovers of earlier starts.
// bootstrap_failures_test.cpp has processes that die, stop or run out of resources meanwhile.
#include "shm/bootstrap.hpp"

#include <gtest/gtest.h>
#include <sched.h>

#include "shm/support.hpp"
#include "util/identity.hpp"

namespace ark::test {
namespace {

class GroupSize : public testing::TestWithParam<int> {};

TEST_P(GroupSize, EveryRankMapsEverySegment) {
  TemporaryDirectory directory;
  Ranks ranks(GetParam(), [&](int rank) {
    DirectoryStore store(directory.path());
    return connect_and_talk(store, options_for(rank, GetParam()));
  });
  expect_all(ranks.wait(), "shared");
}

INSTANTIATE_TEST_SUITE_P(OneToEight, GroupSize, testing::Range(1, 9));

TEST(Bootstrap, OneRankThatDeclinesIsEnough) {
  for (int declining : {0, 2}) {
    TemporaryDirectory directory;
    Ranks ranks(3, [&](int rank) {
      DirectoryStore store(directory.path());
      ConnectOptions options = options_for(rank, 3);
      options.allow_sharing = rank != declining;
      return connect_and_talk(store, options);
    });
    expect_all(ranks.wait(), "apart: sharing memory is switched off on rank " + std::to_string(declining));
  }
}

TEST(Bootstrap, AloneAndDeclining) {
  TemporaryDirectory directory;
  DirectoryStore store(directory.path());
  ConnectOptions options = options_for(0, 1);
  options.allow_sharing = false;
  EXPECT_EQ(connect_and_talk(store, options), "apart: sharing memory is switched off");
}

// Connects under an identity that `change` modified.
std::string connect_as(const TemporaryDirectory& directory, int rank, int size,
                       const std::function<void(Identity&)>& change) {
  DirectoryStore store(directory.path());
  Identity identity = Identity::of_this_process();
  change(identity);
  return connect_and_talk(store, options_for(rank, size), identity);
}

TEST(Bootstrap, TwoMachines) {
  TemporaryDirectory directory;
  Ranks ranks(4, [&](int rank) {
    return connect_as(directory, rank, 4, [&](Identity& identity) {
      if (rank >= 2) identity.host_id[3] ^= 1;
    });
  });
  expect_all(ranks.wait(), "apart: rank 0 and rank 2 run on different machines");
}

TEST(Bootstrap, TwoUsers) {
  TemporaryDirectory directory;
  Ranks ranks(2, [&](int rank) {
    return connect_as(directory, rank, 2, [&](Identity& identity) { identity.uid += static_cast<uint32_t>(rank); });
  });
  expect_all(ranks.wait(), "apart: rank 0 and rank 1 run as different users");
}

TEST(Bootstrap, MachineThatCannotBeIdentified) {
  TemporaryDirectory directory;
  Ranks ranks(2, [&](int rank) {
    return connect_as(directory, rank, 2, [&](Identity& identity) {
      if (rank == 1) identity.unknown = "no boot id here";
    });
  });
  expect_all(ranks.wait(), "apart: rank 1 cannot share memory: no boot id here");
}

// Enters a new network namespace. Without root it uses a user namespace.
bool enter_new_network_namespace() {
  return ::unshare(CLONE_NEWNET) == 0 || ::unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0;
}

bool has_network_namespaces() {
  Ranks probe(1, [](int) { return std::string(enter_new_network_namespace() ? "yes" : "no"); });
  return probe.wait()[0].text == "yes";
}

TEST(Bootstrap, TwoNetworkNamespaces) {
  if (!has_network_namespaces()) GTEST_SKIP() << "may not create network namespaces";
  TemporaryDirectory directory;
  Ranks ranks(3, [&](int rank) {
    const uid_t uid = ::geteuid();
    if (rank == 1 && !enter_new_network_namespace()) return std::string("no namespace");
    return connect_as(directory, rank, 3, [&](Identity& identity) { identity.uid = uid; });
  });
  expect_all(ranks.wait(), "apart: rank 0 and rank 1 run in different containers (network namespaces)");
}

// Without /proc only the sockets reveal the namespaces. That must not be mistaken for a rank that died.
TEST(Bootstrap, TwoNetworkNamespacesThatCannotBeTold) {
  if (!has_network_namespaces()) GTEST_SKIP() << "may not create network namespaces";
  TemporaryDirectory directory;
  Ranks ranks(2, [&](int rank) {
    const uid_t uid = ::geteuid();
    if (rank == 1 && !enter_new_network_namespace()) return std::string("no namespace");
    return connect_as(directory, rank, 2, [&](Identity& identity) {
      identity.uid = uid;
      identity.network_space = 0;
    });
  });
  expect_all(ranks.wait(),
             "apart: rank 0 cannot share memory with rank 1: its local socket cannot be reached from rank 0");
}

TEST(Bootstrap, RanksOfDifferentVersionsAreToldSo) {
  EXPECT_EQ(text_of_release(0x01020a), "1.2.10");
  EXPECT_GT(this_release(), 0u);
  for (int declining : {0, 1}) {  // also where no memory is shared
    TemporaryDirectory directory;
    Ranks ranks(3, [&](int rank) {
      DirectoryStore store(directory.path());
      ConnectOptions options = options_for(rank, 3);
      options.allow_sharing = declining == 0;
      options.release = rank == 2 ? 0x020000 : 0x010203;
      return connect_and_talk(store, options);
    });
    for (const Result& result : ranks.wait())
      EXPECT_NE(result.text.find("ranks have different versions: ark_torch 1.2.3 on rank 0, ark_torch 2.0.0 on rank 2"),
                result.text.npos)
          << result.text;
  }
}

TEST(Bootstrap, KeysOfEarlierStartsDoNoHarm) {
  // Repeats starts on the same store and keys: some killed half-way, some successful, of several sizes.
  TemporaryDirectory directory;
  int starts = 0;
  for (int size : {3, 3, 2, 4, 3})
    for (int late : {0, size - 1}) {  // the first rank to start finds only stale keys
      {
        Ranks killed(size, [&](int rank) {
          WatchedStore store(directory.path(), [](const char* operation, const std::string& key) {
            if (std::string(operation) == "was set" && key.find("record") != key.npos) ::pause();
          });
          return connect_and_talk(store, options_for(rank, size));
        });
        std::this_thread::sleep_for(milliseconds(50));
      }
      const std::string key = "written/" + std::to_string(++starts);
      Ranks ranks(size, [&](int rank) {
        if (rank == late) std::this_thread::sleep_for(milliseconds(100));
        DirectoryStore store(directory.path());
        return connect_and_talk(store, options_for(rank, size), key);
      });
      expect_all(ranks.wait(), "shared");
    }
}

// Counts accesses to the store. A query that finds no answer yet is not counted.
class CountingStore : public DirectoryStore {
 public:
  using DirectoryStore::DirectoryStore;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    ++count;
    DirectoryStore::set(key, value);
  }
  std::optional<std::vector<uint8_t>> find(const std::string& key) override {
    auto value = DirectoryStore::find(key);
    count += value.has_value() && counts_single ? 1 : 0;
    return value;
  }
  std::optional<std::vector<std::vector<uint8_t>>> find_all(const std::vector<std::string>& keys) override {
    const int before = count;
    auto values = DirectoryStore::find_all(keys);
    count = before + (values.has_value() ? 1 : 0);
    return values;
  }
  int count = 0;
  bool counts_single = true;
};

TEST(Bootstrap, TheStoreIsAskedAFixedNumberOfTimesHoweverManyRanks) {
  for (int size : {3, 5, 12}) {
    TemporaryDirectory directory;
    Ranks ranks(size, [&](int rank) {
      CountingStore store(directory.path());
      store.counts_single = rank != 0;  // which reads single keys only to see who is late, on a busy machine
      Identity identity = Identity::of_this_process();
      identity.host_id[3] = static_cast<uint8_t>(rank / 2);  // two ranks per machine
      identity.host_id[4] ^= 1;
      ConnectResult result = connect(store, options_for(rank, size), identity);
      return result.neighbourhood ? "shared" : std::to_string(store.count);
    });
    const auto& results = ranks.wait();
    EXPECT_EQ(results[0].text, "6");  // token, offer, record, records; everyone's tokens, everyone's records
    for (int rank = 1; rank < size; ++rank) EXPECT_EQ(results[rank].text, "4") << rank << " of " << size;
  }
}

TEST(Bootstrap, NonsenseUnderItsKeysIsWaitedOut) {
  TemporaryDirectory directory;
  DirectoryStore store(directory.path());
  store.set("memory/token/1", {1, 2, 3});
  store.set("memory/offer", std::vector<uint8_t>(64, 0xff));
  Ranks ranks(2, [&](int rank) {
    DirectoryStore mine(directory.path());
    return connect_and_talk(mine, options_for(rank, 2));
  });
  expect_all(ranks.wait(), "shared");
}

TEST(Bootstrap, WrongArgumentsAreNamed) {
  TemporaryDirectory directory;
  DirectoryStore store(directory.path());
  auto message = [&](const std::function<void(ConnectOptions&)>& change) {
    ConnectOptions options = options_for(0, 2);
    change(options);
    try {
      connect(store, options);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  auto contains = [](const std::string& text, const char* part) { return text.find(part) != text.npos; };
  EXPECT_TRUE(contains(message([](auto& o) { o.size = 0; }), "size must be 1..65536, got 0"));
  EXPECT_TRUE(contains(message([](auto& o) { o.rank = 2; }), "rank must be 0..1, got 2"));
  EXPECT_TRUE(contains(message([](auto& o) { o.rank = -1; }), "rank must be 0..1, got -1"));
  EXPECT_TRUE(contains(message([](auto& o) { o.segment_bytes = 0; }), "segment_bytes must be"));
  EXPECT_TRUE(contains(message([](auto& o) { o.timeout = milliseconds(0); }), "timeout must be positive, got 0"));
}

}  // namespace
}  // namespace ark::test
