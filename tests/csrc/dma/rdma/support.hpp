// Test support: two or more ranks in one process, each with its own engine over the pretended libibverbs.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <mutex>

#include "control.hpp"
#include "dma/rdma/messages.hpp"
#include "support/wait_until.hpp"

namespace ark::rdma_test {

using rdma::Channel;
using rdma::Engine;
using rdma::Messages;
using Clock = std::chrono::steady_clock;

inline Clock::time_point soon() {
  return Clock::now() + std::chrono::seconds(30);
}

class MemoryStore {
 public:
  void set(const std::string& key, const std::vector<uint8_t>& value) {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
  }
  std::optional<std::vector<uint8_t>> find(const std::string& key) {
    const std::lock_guard lock(mutex_);
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<uint8_t>> values_;
};

class StoreOf : public KeyValueStore {
 public:
  explicit StoreOf(std::shared_ptr<MemoryStore> store) : store_(std::move(store)) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override { store_->set(key, value); }
  std::vector<uint8_t> get(const std::string&, std::chrono::milliseconds) override { std::abort(); }
  std::optional<std::vector<uint8_t>> find(const std::string& key) override { return store_->find(key); }

 private:
  const std::shared_ptr<MemoryStore> store_;
};

inline rdma::Options pretended_options() {
  rdma::Options options;
  options.library = PRETENDED_VERBS;
  options.timeout = 13;  // 34 ms until a packet is resent, 0.23 s until the peer counts as lost
  return options;
}

inline std::shared_ptr<Engine> new_engine(const rdma::Options& options = pretended_options()) {
  std::string why_not;
  auto verbs = rdma::Verbs::load(options.library, why_not);
  EXPECT_TRUE(verbs) << why_not;
  return std::make_shared<Engine>(rdma::Device::open(verbs, options));
}

inline size_t open_descriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& one : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

// Resets the controls, and checks that nothing leaked.
class RdmaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    clear();
    descriptors_ = open_descriptors();
  }
  void TearDown() override {
    clear();
    const auto& counts = *pretend_counts();
    EXPECT_EQ(counts.pairs, 0);
    EXPECT_EQ(counts.queues, 0);
    EXPECT_EQ(counts.regions, 0);
    EXPECT_EQ(counts.channels, 0);
    EXPECT_EQ(counts.domains, 0);
    EXPECT_EQ(counts.contexts, 0);
    EXPECT_EQ(open_descriptors(), descriptors_);
  }
  static pretended::Control& control() { return *pretend_control(); }

 private:
  static void clear() {
    auto* words = reinterpret_cast<std::atomic<uint32_t>*>(pretend_control());
    for (size_t i = 0; i < sizeof(pretended::Control) / sizeof(uint32_t); ++i) words[i] = 0;
  }
  size_t descriptors_ = 0;
};

// Two connected channels.
struct ChannelPair {
  explicit ChannelPair(Channel::Shape shape = {}, const rdma::Options& options = pretended_options())
      : engines{new_engine(options), new_engine(options)} {
    for (int r = 0; r < 2; ++r) ends[r] = std::make_unique<Channel>(engines[r], r, 1 - r, 2, shape);
    for (int r = 0; r < 2; ++r) ends[r]->connect(ends[1 - r]->endpoint(), 4096);
  }
  Channel& operator[](int rank) { return *ends[rank]; }
  std::shared_ptr<Engine> engines[2];
  std::unique_ptr<Channel> ends[2];
};

// The ranks of a group; rails: on how many devices.
struct Group {
  explicit Group(int size, Channel::Shape shape = {}, const rdma::Options& options = pretended_options(),
                 size_t most_kept = 1024, int rails = 1) {
    for (int r = 0; r < size; ++r) {
      Messages::Setup setup;
      setup.most_kept = most_kept;
      setup.rank = r;
      setup.size = size;
      setup.mtu = 4096;
      setup.prefix = "rdma";
      setup.timeout = std::chrono::seconds(20);
      setup.probe = std::chrono::milliseconds(50);
      setup.shape = shape;
      std::vector<std::shared_ptr<Engine>> engines;
      for (int rail = 0; rail < rails; ++rail) {
        rdma::Options one = options;
        if (rails > 1) one.device = "pretend" + std::to_string(rail);
        engines.push_back(new_engine(one));
      }
      ranks.push_back(std::make_shared<Messages>(std::move(engines), std::make_unique<StoreOf>(store), setup));
    }
  }
  ~Group() {
    std::vector<std::thread> closing;  // all at once, as ranks do
    for (auto& rank : ranks)
      if (rank) closing.emplace_back([&rank] { rank->close(std::chrono::seconds(5)); });
    for (auto& one : closing) one.join();
  }
  Messages& operator[](int rank) { return *ranks[rank]; }
  std::shared_ptr<MemoryStore> store = std::make_shared<MemoryStore>();
  std::vector<std::shared_ptr<Messages>> ranks;
};

inline std::vector<uint8_t> pattern(size_t bytes, uint32_t seed) {
  std::vector<uint8_t> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(i * 131 + seed * 77 + (i >> 8));
  return data;
}

}  // namespace ark::rdma_test
