// Tests what a rank reports about another node's heartbeat, and how many store accesses that costs.
#include "collectives/node_beats.hpp"

#include <gtest/gtest.h>

#include <condition_variable>
#include <map>
#include <mutex>

#include "util/error.hpp"

namespace ark {
namespace {

using Milliseconds = NodeBeats::Milliseconds;

// A store shared by all nodes. It counts writes, and can be told to fail or to block.
class BeatStore : public KeyValueStore {
 public:
  enum class Mood { well, gone, silent };

  ~BeatStore() override { become(Mood::gone); }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    std::unique_lock lock(mutex_);
    ++writes_[key];
    changed_.notify_all();
    obey(lock);
    values_[key] = value;
  }
  std::vector<uint8_t> get(const std::string&, Milliseconds) override { throw std::logic_error("beats never wait"); }
  std::optional<std::vector<uint8_t>> find(const std::string& key) override {
    std::unique_lock lock(mutex_);
    ++reads_;
    obey(lock);
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }

  void become(Mood mood) {
    const std::lock_guard lock(mutex_);
    mood_ = mood;
    changed_.notify_all();
  }
  bool wait_for_writes(const std::string& key, int more) {
    std::unique_lock lock(mutex_);
    const int wanted = writes_[key] + more;
    return changed_.wait_for(lock, std::chrono::seconds(20), [&] { return writes_[key] >= wanted; });
  }
  std::map<std::string, int> writes() {
    const std::lock_guard lock(mutex_);
    return writes_;
  }
  int reads() {
    const std::lock_guard lock(mutex_);
    return reads_;
  }

 private:
  void obey(std::unique_lock<std::mutex>& lock) {
    changed_.wait(lock, [this] { return mood_ != Mood::silent; });
    if (mood_ == Mood::gone) throw Error(ErrorKind::system, "the store has gone");
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, int> writes_;
  std::map<std::string, std::vector<uint8_t>> values_;
  int reads_ = 0;
  Mood mood_ = Mood::well;
};

const std::vector<int> kNodes = {0, 0, 1, 1, 1, 2};

std::unique_ptr<NodeBeats> beats_of(const std::shared_ptr<BeatStore>& store, int rank) {
  return std::make_unique<NodeBeats>(store, "beat", NodePlan(kNodes, rank), Milliseconds(5));
}

TEST(NodeBeats, PeriodFollowsTheTimeout) {
  EXPECT_EQ(NodeBeats::period_of(Milliseconds(1)), Milliseconds(250));
  EXPECT_EQ(NodeBeats::period_of(Milliseconds(16'000)), Milliseconds(1000));
  EXPECT_EQ(NodeBeats::period_of(std::chrono::minutes(30)), Milliseconds(5000));
  EXPECT_EQ(NodeBeats::period_of(Milliseconds::max()), Milliseconds(5000));
}

TEST(NodeBeats, OneRankOfANodeWritesAndNobodyReads) {
  const auto store = std::make_shared<BeatStore>();
  std::vector<std::unique_ptr<NodeBeats>> all;
  for (int rank = 0; rank < 6; ++rank) all.push_back(beats_of(store, rank));
  for (const char* key : {"beat/0", "beat/1", "beat/2"}) EXPECT_TRUE(store->wait_for_writes(key, 3)) << key;
  all.clear();
  const auto writes = store->writes();
  EXPECT_EQ(writes.size(), 3u);  // one key per node, however many ranks it has
  EXPECT_EQ(store->reads(), 0);
  std::this_thread::sleep_for(Milliseconds(30));
  EXPECT_EQ(store->writes(), writes);  // no more writes after they left
}

TEST(NodeBeats, ANodeThatBeatsIsNotSilent) {
  const auto store = std::make_shared<BeatStore>();
  const auto own = beats_of(store, 0), other = beats_of(store, 2), third = beats_of(store, 5);
  ASSERT_TRUE(store->wait_for_writes("beat/1", 1));
  const auto before = own->read();
  ASSERT_TRUE(before.lived[1]);
  ASSERT_TRUE(store->wait_for_writes("beat/1", 20));  // ages are in milliseconds
  ASSERT_TRUE(store->wait_for_writes("beat/2", 20));
  EXPECT_EQ(own->silence(3, before, own->read()), "");
}

TEST(NodeBeats, ANodeThatStopsIsNamedWithItsRanks) {
  const auto store = std::make_shared<BeatStore>();
  const auto own = beats_of(store, 5);
  auto other = beats_of(store, 2);
  ASSERT_TRUE(store->wait_for_writes("beat/1", 2));
  other.reset();
  const auto before = own->read();
  const std::string told = own->silence(4, before, own->read());
  EXPECT_EQ(told,
            "node 1 (ranks 2, 3 and 4) has not been heard of for 1 s: its machine is down, stopped or cut off, or its "
            "processes are");
  const auto never = own->read();  // its first rank never started
  EXPECT_FALSE(never.lived[0]);
  EXPECT_NE(own->silence(1, never, never), "");
}

// A rank waits for a rank that waits for a lost node. The error names that node.
TEST(NodeBeats, AnotherNodeThatIsSilentIsNamed) {
  const auto store = std::make_shared<BeatStore>();
  const auto own = beats_of(store, 5), waited_for = beats_of(store, 0);
  beats_of(store, 2).reset();
  ASSERT_TRUE(store->wait_for_writes("beat/0", 1));
  const auto before = own->read();
  ASSERT_TRUE(store->wait_for_writes("beat/0", 20));
  const std::string told = own->silence(0, before, own->read());
  EXPECT_EQ(told.find("node 1 (ranks 2, 3 and 4) has not been heard of"), 0u) << told;
}

TEST(NodeBeats, AStoreThatHasGoneIsSaid) {
  const auto store = std::make_shared<BeatStore>();
  const auto own = beats_of(store, 2);
  ASSERT_TRUE(store->wait_for_writes("beat/1", 1));
  store->become(BeatStore::Mood::gone);
  const auto read = own->read();
  EXPECT_EQ(
      own->silence(0, read, read),
      "node 0 (ranks 0 and 1) is silent, and so is the rendezvous store, which is on rank 0's node as a rule (the "
      "store has gone)");
  EXPECT_EQ(own->silence(5, read, read),
            "node 2 (rank 5) is silent, and the rendezvous store cannot tell whether it lives (the store has gone)");
}

// A blocked store delays neither a query nor leaving.
TEST(NodeBeats, AStoreThatNeverAnswersHoldsNobodyUp) {
  const auto store = std::make_shared<BeatStore>();
  auto own = beats_of(store, 2);
  ASSERT_TRUE(store->wait_for_writes("beat/1", 1));
  store->become(BeatStore::Mood::silent);
  ASSERT_TRUE(store->wait_for_writes("beat/1", 1));  // its thread is inside the store
  EXPECT_EQ(own->read().trouble, "no answer in 2000 ms");
  own.reset();
  const int writes = store->writes()["beat/1"];
  store->become(BeatStore::Mood::well);
  std::this_thread::sleep_for(Milliseconds(50));
  EXPECT_EQ(store->writes()["beat/1"], writes);  // the abandoned thread has ended
}

// Bytes that are no heartbeat are an error.
TEST(NodeBeats, WhatIsNoBeatIsTrouble) {
  const auto store = std::make_shared<BeatStore>();
  store->set("beat/1", {1, 2, 3});
  const auto read = beats_of(store, 0)->read();
  EXPECT_EQ(read.trouble, "a beat has 3 bytes, not of this ark_torch");
}

}  // namespace
}  // namespace ark
