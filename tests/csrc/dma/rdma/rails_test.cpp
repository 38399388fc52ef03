// Ranks with two NICs each: what goes along both, in which order it is told, and what a NIC that fails leaves to the
// other.
#include <algorithm>
#include <random>
#include <thread>

#include "support.hpp"

namespace ark::rdma_test {
namespace {

constexpr size_t kStriped = 3 << 20;

std::string ending_of(rdma::Message& message) {
  try {
    return message.wait_until(soon()) ? "" : "late";
  } catch (const Error& error) {
    return error.what();
  }
}

rdma::Options rail_options(int timeout = 13) {
  rdma::Options options = pretended_options();
  options.timeout = timeout;
  return options;
}

struct Rails : Group {
  explicit Rails(int size, const rdma::Options& options = rail_options()) : Group(size, {}, options, 1024, 2) {}

  // One message of each to the other.
  void exchange(size_t bytes, uint32_t seed) {
    std::vector<uint8_t> sources[2], targets[2];
    std::vector<Messages::MessagePtr> all;
    for (int r = 0; r < 2; ++r) {
      sources[r] = pattern(bytes, seed + r);
      targets[r].resize(bytes);
    }
    for (int r = 0; r < 2; ++r) {
      all.push_back((*this)[r].receive(1 - r, 3, targets[r].data(), bytes));
      all.push_back((*this)[r].send(1 - r, 3, sources[r].data(), bytes));
    }
    for (auto& one : all) EXPECT_EQ(ending_of(*one), "");
    for (int r = 0; r < 2; ++r) EXPECT_TRUE(sources[r] == targets[1 - r]) << "rank " << r;
  }

  // Until both sides have heard each other on the second rail.
  void prove() {
    exchange(100, 0);
    const auto used = [&] {
      const uint64_t before = pretend_counts()->bytes_of[1];
      exchange(kStriped, 1);
      return pretend_counts()->bytes_of[1] >= before + kStriped;  // half of each of two messages
    };
    for (int turn = 0; turn < 1000; ++turn) {
      if (used()) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ADD_FAILURE() << "the second rail is never used";
  }
};

using RailsTest = RdmaTest;

TEST_F(RailsTest, LargeMessagesGoAlongBothInHalves) {
  Rails group(2);
  group.prove();
  for (const size_t bytes : {size_t{4096}, (size_t{256} << 10) - 1, size_t{256} << 10, kStriped + 4097, kStriped + 1}) {
    uint64_t before[2];
    for (int device = 0; device < 2; ++device) before[device] = pretend_counts()->bytes_of[device];
    group.exchange(bytes, static_cast<uint32_t>(bytes));
    const uint64_t first = pretend_counts()->bytes_of[0] - before[0],
                   second = pretend_counts()->bytes_of[1] - before[1];
    if (bytes < 256 << 10) {
      EXPECT_EQ(second, 0u) << bytes;
    } else {
      EXPECT_GE(second, bytes - 2 * 4096) << bytes;  // of both ranks' messages; parts are whole pages
      EXPECT_LE(second, bytes) << bytes;
      EXPECT_GE(first, bytes) << bytes;
    }
  }
  EXPECT_EQ(group[0].trouble(), "");
  EXPECT_EQ(group[0].device(), "pretend0, pretend1");
}

// Three ranks, messages of all sizes, several at a time; and over links that lose packets.
class Mixed : public RdmaTest, public ::testing::WithParamInterface<int> {};
TEST_P(Mixed, AllThatIsReceivedIsWhatWasSent) {
  control().loss = GetParam();
  constexpr int kRanks = 3, kMessages = 12;
  Rails group(kRanks, rail_options(GetParam() ? 11 : 13));
  std::vector<std::thread> threads;
  for (int me = 0; me < kRanks; ++me) {
    threads.emplace_back([&, me] {
      const auto bytes_of = [](int from, int to, int n) {
        std::minstd_rand random(from * 7919 + to * 104729 + n * 31);
        random();
        return n % 2 ? random() % 2000 : (256 << 10) + random() % 500'000;
      };
      std::vector<Messages::MessagePtr> all;
      std::vector<std::vector<uint8_t>> memory;
      std::vector<std::pair<size_t, uint32_t>> expected;
      memory.reserve(kRanks * kMessages * 2);
      for (int n = 0; n < kMessages; ++n) {
        for (int peer = 0; peer < kRanks; ++peer) {
          if (peer == me) continue;
          memory.push_back(pattern(bytes_of(me, peer, n), me * 100 + n));
          all.push_back(group[me].send(peer, 1, memory.back().data(), memory.back().size()));
          memory.emplace_back(bytes_of(peer, me, n));
          expected.emplace_back(memory.size() - 1, peer * 100 + n);
          all.push_back(group[me].receive(peer, 1, memory.back().data(), memory.back().size()));
        }
      }
      for (auto& one : all) EXPECT_EQ(ending_of(*one), "");
      for (const auto& [place, seed] : expected) EXPECT_TRUE(memory[place] == pattern(memory[place].size(), seed));
    });
  }
  for (auto& thread : threads) thread.join();
}
INSTANTIATE_TEST_SUITE_P(Loss, Mixed, ::testing::Values(0, 100));

// What is put along both rails is there when the signal behind it is.
TEST_F(RailsTest, ASignalComesBehindAllPartsOfAPut) {
  Rails group(2);
  for (int r = 0; r < 2; ++r) group[r].open_window(5, {1 - r});
  group.prove();
  std::vector<uint8_t> target(kStriped);
  auto held = group[1].hold(target.data(), target.size());
  std::vector<uint8_t> sources[2] = {pattern(kStriped, 1), pattern(kStriped, 2)};
  for (uint64_t n = 1; n <= 12; ++n) {
    const auto& source = sources[n % 2];
    const auto put =
        group[0].put(1, source.data(), source.size(), reinterpret_cast<uint64_t>(target.data()), held.remote_keys());
    const auto signal = group[0].signal(1, 5);
    EXPECT_TRUE(group[1].wait_signals(0, 5, n, soon()));
    EXPECT_TRUE(target == source) << n;
    EXPECT_EQ(group[1].signals(0, 5), n);
    EXPECT_EQ(ending_of(*put), "");
    EXPECT_EQ(ending_of(*signal), "");
  }
  held.reset();
}

// The second NIC's link goes while messages are under way: they arrive by the first, and so do all later ones.
TEST_F(RailsTest, ALinkThatGoesLeavesItsPartsToTheFirst) {
  for (int round = 0; round < 3; ++round) {
    Rails group(2);
    group.prove();
    std::vector<uint8_t> sources[2], targets[2];
    std::vector<Messages::MessagePtr> all;
    for (int r = 0; r < 2; ++r) {
      sources[r] = pattern(8 << 20, round + r);
      targets[r].resize(sources[r].size());
    }
    std::thread cut([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
      control().link_down_1 = 1;
    });
    for (int r = 0; r < 2; ++r) {
      all.push_back(group[r].receive(1 - r, 3, targets[r].data(), targets[r].size()));
      all.push_back(group[r].send(1 - r, 3, sources[r].data(), sources[r].size()));
    }
    cut.join();
    for (auto& one : all) EXPECT_EQ(ending_of(*one), "");
    for (int r = 0; r < 2; ++r) EXPECT_TRUE(sources[r] == targets[1 - r]) << r;
    // One more, so that the NIC is asked however early the last one was through.
    group.exchange(kStriped, 5);
    const std::string trouble = group[0].trouble();
    EXPECT_NE(trouble.find("pretend1 is not used with rank 1: "), std::string::npos) << trouble;
    const uint64_t before = pretend_counts()->bytes_of[1];
    group.exchange(kStriped, 9);
    EXPECT_EQ(pretend_counts()->bytes_of[1], before);
    control().link_down_1 = 0;
  }
}

// The same of puts: the signal behind them waits until they are there.
TEST_F(RailsTest, ASignalBehindAPutOfALostRailComesWithIt) {
  Rails group(2);
  for (int r = 0; r < 2; ++r) group[r].open_window(5, {1 - r});
  group.prove();
  std::vector<uint8_t> target(kStriped);
  auto held = group[1].hold(target.data(), target.size());
  const auto source = pattern(kStriped, 1);
  control().link_down_1 = 1;
  const auto put =
      group[0].put(1, source.data(), source.size(), reinterpret_cast<uint64_t>(target.data()), held.remote_keys());
  const auto signal = group[0].signal(1, 5);
  EXPECT_FALSE(group[1].wait_signals(0, 5, 1, Clock::now() + std::chrono::milliseconds(20)));  // the NIC still tries
  EXPECT_TRUE(group[1].wait_signals(0, 5, 1, soon()));
  EXPECT_TRUE(target == source);
  EXPECT_EQ(ending_of(*put), "");
  held.reset();
}

// Never there: the first one carries all, without a failure.
TEST_F(RailsTest, ARailThatReachesNobodyIsNotUsed) {
  control().link_down_1 = 1;
  Rails group(2);
  for (uint32_t n = 0; n < 4; ++n) group.exchange(kStriped, n);
  const uint64_t before = pretend_counts()->bytes_of[0];
  group.exchange(kStriped, 7);
  EXPECT_GE(pretend_counts()->bytes_of[0] - before, 2 * kStriped);
}

TEST_F(RailsTest, TheFirstLinkIsTheConnections) {
  Rails group(2);
  group.prove();
  control().link_down = 1;
  std::vector<uint8_t> data(kStriped), target(kStriped);
  const auto received = group[1].receive(0, 3, target.data(), kStriped);
  const auto sent = group[0].send(1, 3, data.data(), kStriped);
  EXPECT_NE(ending_of(*received).find("RDMA with rank 0 over pretend0"), std::string::npos);
  EXPECT_NE(ending_of(*sent), "");
}

TEST_F(RailsTest, DevicesAreChosenByTheirNames) {
  const auto names = [](const std::string& device, std::string* left_out = nullptr) {
    rdma::Options options = pretended_options();
    options.device = device;
    std::string text, why;
    for (const auto& rail : Engine::rails_of(options, why)) text += rail->device()->port().device + " ";
    if (left_out) *left_out = why;
    return text;
  };
  const auto refusal = [&](const std::string& device) {
    try {
      return names(device);
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  EXPECT_EQ(names(""), "pretend0 ");
  EXPECT_EQ(names("all"), "pretend0 pretend1 ");
  EXPECT_EQ(names("pretend1,pretend0"), "pretend1 pretend0 ");
  EXPECT_NE(refusal("pretend0,mlx5_7").find("there is no RDMA device \"mlx5_7\""), std::string::npos);
  EXPECT_NE(refusal("pretend0,pretend0").find("named twice"), std::string::npos);
  control().port_down_1 = 1;
  std::string left_out;
  EXPECT_EQ(names("all", &left_out), "pretend0 ");
  EXPECT_NE(left_out.find("pretend1: its port 1 is down"), std::string::npos) << left_out;
  EXPECT_NE(refusal("pretend1").find("port 1 is down"), std::string::npos);
  control().port_down = 1;
  EXPECT_NE(refusal("all").find("pretend0: its port 1 is down"), std::string::npos);
}

}  // namespace
}  // namespace ark::rdma_test
