// Tests the RDMA engine on the kernel's real verbs: soft-RoCE at both ends of a wire with losses set by netem.
//
// tests/rdma/run.sh runs it in the guest. Tests with injected faults use pretended verbs (tests/csrc/dma/rdma).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

#include "dma/rdma/messages.hpp"

namespace ark::rdma_test {
namespace {

using rdma::Channel;
using rdma::Engine;
using rdma::Messages;
using Clock = std::chrono::steady_clock;

Clock::time_point soon() {
  return Clock::now() + std::chrono::seconds(60);
}

// "loss 1%", or an empty string.
void wire(const std::string& netem) {
  static std::string now;
  if (now == netem) return;
  now = netem;
  for (const char* end : {"wire_a", "wire_b"}) {
    const std::string device = std::string(" dev ") + end + " root";
    (void)!std::system(("tc qdisc del" + device + " 2>/dev/null").c_str());
    if (!netem.empty()) ASSERT_EQ(std::system(("tc qdisc add" + device + " netem " + netem).c_str()), 0);
  }
}

class Verbs : public ::testing::Test {
 protected:
  void SetUp() override { wire(""); }
  void TearDown() override { wire(""); }
};

rdma::Options options_of(int end, int timeout) {
  rdma::Options options;
  options.device = end == 0 ? "rxe_a" : "rxe_b";
  options.timeout = timeout;
  return options;
}

struct Pair {
  explicit Pair(int timeout = 14, Channel::Shape shape = {}) {
    for (int r = 0; r < 2; ++r) engines[r] = Engine::of(options_of(r, timeout));
    for (int r = 0; r < 2; ++r) ends[r] = std::make_unique<Channel>(engines[r], r, 1 - r, 2, shape);
    for (int r = 0; r < 2; ++r)
      ends[r]->connect(ends[1 - r]->endpoint(),
                       std::min(engines[0]->device()->port().mtu, engines[1]->device()->port().mtu));
  }
  Channel& operator[](int rank) { return *ends[rank]; }
  std::shared_ptr<Engine> engines[2];
  std::unique_ptr<Channel> ends[2];
};

std::vector<uint8_t> pattern(size_t bytes, uint32_t seed) {
  std::vector<uint8_t> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(i * 131 + seed * 77 + (i >> 8));
  return data;
}

TEST_F(Verbs, ChoosesTheAddressByItsType) {
  for (int r = 0; r < 2; ++r) {
    const std::string text = Engine::of(options_of(r, 14))->device()->text();
    EXPECT_NE(text.find("RoCE v2, IPv4: 10.78.0." + std::to_string(r + 1)), std::string::npos) << text;
    std::printf("[          ] %s\n", text.c_str());
  }
}

TEST_F(Verbs, PutsSignalsAndCredits) {
  Pair pair(14, {8, 256});
  std::thread sender([&] {
    for (uint32_t n = 0; n < 200; ++n) {
      pair[0].flush(soon());
      std::memcpy(pair[0].outbox(n), &n, sizeof n);
      pair[0].put_with_signal(pair[0].outbox(n), pair[0].outbox_key(), 200, pair[0].remote_slot(n),
                              pair[0].remote_key(), n);
    }
    pair[0].flush(soon());
  });
  for (uint32_t n = 0; n < 200; ++n) {
    EXPECT_EQ(pair[1].wait(soon()), n);
    uint32_t found;
    std::memcpy(&found, pair[1].inbox(n), sizeof found);
    EXPECT_EQ(found, n);
    pair[1].release();
  }
  sender.join();
  EXPECT_GE(pair[0].counts().least_credits, 1u);
  EXPECT_GT(pair[1].counts().credit_signals, 0u);
}

TEST_F(Verbs, ALargePutIsCutToWhatTheDeviceTakes) {
  Pair pair;
  const auto source = pattern(20 << 20, 1);
  std::vector<uint8_t> target(source.size());
  auto here = pair.engines[0]->memory().hold(source.data(), source.size());
  auto there = pair.engines[1]->memory().hold(target.data(), target.size());
  pair[0].put(source.data(), here.local_key(), source.size(), reinterpret_cast<uint64_t>(target.data()),
              there.remote_key());
  pair[0].signal(1);
  EXPECT_EQ(pair[1].wait(soon()), 1u);
  EXPECT_EQ(source, target);
}

TEST_F(Verbs, AWrongKeyIsRefused) {
  Pair pair;
  pair[0].put(pair[0].outbox(0), pair[0].outbox_key(), 4096, pair[0].remote_slot(0), pair[0].remote_key() ^ 0x5a5a00);
  try {
    pair[0].flush(soon());
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("refused access"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(pair[0].drain(soon()));
}

TEST_F(Verbs, OnePercentLossIsSurvived) {
  wire("loss 1%");
  Pair pair(10);  // 4 ms until a packet is resent
  const auto source = pattern(2 << 20, 2);
  std::vector<uint8_t> target(source.size());
  auto here = pair.engines[0]->memory().hold(source.data(), source.size());
  auto there = pair.engines[1]->memory().hold(target.data(), target.size());
  for (uint32_t n = 0; n < 4; ++n) {
    std::fill(target.begin(), target.end(), 0);
    pair[0].put(source.data(), here.local_key(), source.size(), reinterpret_cast<uint64_t>(target.data()),
                there.remote_key());
    pair[0].signal(n);
    EXPECT_EQ(pair[1].wait(soon()), n);
    EXPECT_EQ(source, target);
    pair[1].release();
  }
}

TEST_F(Verbs, ALinkThatIsGoneForTwoSecondsIsSurvived) {
  Pair pair(18);  // 1.1 s, seven times
  wire("loss 100%");
  pair[0].signal(5);
  std::this_thread::sleep_for(std::chrono::seconds(2));
  EXPECT_FALSE(pair[0].failure());
  wire("");
  EXPECT_EQ(pair[1].wait(soon()), 5u);
  pair[1].release();
  pair[0].flush(soon());
}

TEST_F(Verbs, ALinkThatIsGoneForGoodIsNoticedByWhoOnlyWaits) {
  Pair pair(14);  // 67 ms, seven times
  wire("loss 100%");
  pair[1].probe();
  try {
    pair[1].wait(soon());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::peer_lost) << error.what();
    EXPECT_EQ(error.context().peer, 0);
  }
}

TEST_F(Verbs, APeerWhoseQueuePairIsGoneIsNoticed) {
  Pair pair(10);
  pair.ends[1].reset();
  pair[0].signal(1);
  try {
    pair[0].flush(soon());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::peer_lost) << error.what();
  }
}

class MemoryStore : public KeyValueStore {
 public:
  struct Values {
    std::mutex mutex;
    std::map<std::string, std::vector<uint8_t>> values;
  };
  explicit MemoryStore(std::shared_ptr<Values> values) : values_(std::move(values)) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    const std::lock_guard lock(values_->mutex);
    values_->values[key] = value;
  }
  std::vector<uint8_t> get(const std::string&, std::chrono::milliseconds) override { std::abort(); }
  std::optional<std::vector<uint8_t>> find(const std::string& key) override {
    const std::lock_guard lock(values_->mutex);
    const auto found = values_->values.find(key);
    return found == values_->values.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  const std::shared_ptr<Values> values_;
};

TEST_F(Verbs, MessagesOfAllSizesUnderLoss) {
  wire("loss 1%");
  auto values = std::make_shared<MemoryStore::Values>();
  std::shared_ptr<Messages> ranks[2];
  for (int r = 0; r < 2; ++r) {
    Messages::Setup setup;
    setup.rank = r;
    setup.size = 2;
    setup.mtu = 1024;
    setup.prefix = "test";
    setup.timeout = std::chrono::seconds(60);
    ranks[r] = std::make_shared<Messages>(Engine::of(options_of(r, 10)), std::make_unique<MemoryStore>(values), setup);
  }
  const auto talk = [&](int me) {
    std::vector<std::vector<uint8_t>> memory;
    std::vector<Messages::MessagePtr> all;
    memory.reserve(100);
    for (int n = 0; n < 50; ++n) {
      const size_t bytes = n % 3 == 0 ? 30'000 + n : 1 + n * 70;
      memory.push_back(pattern(bytes, me * 100 + n));
      all.push_back(ranks[me]->send(1 - me, 0, memory.back().data(), bytes));
      memory.emplace_back(bytes);
      all.push_back(ranks[me]->receive(1 - me, 0, memory.back().data(), bytes));
    }
    for (auto& one : all) EXPECT_TRUE(one->wait_until(soon()));
    for (int n = 0; n < 50; ++n) EXPECT_EQ(memory[2 * n + 1], pattern(memory[2 * n].size(), (1 - me) * 100 + n));
  };
  std::thread other([&] { talk(1); });
  talk(0);
  other.join();
  std::thread closing([&] { ranks[1]->close(std::chrono::seconds(10)); });
  ranks[0]->close(std::chrono::seconds(10));
  closing.join();
}

}  // namespace
}  // namespace ark::rdma_test
