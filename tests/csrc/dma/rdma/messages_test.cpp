// Tests messages over a pretended NIC: matching, sizes around the small limit, giving up, peers that leave, and false
// records.
#include <algorithm>
#include <random>
#include <thread>

#include "support.hpp"

namespace ark::rdma_test {
namespace {

using MessagesTest = RdmaTest;

std::string failure_of(rdma::Message& message) {
  try {
    return message.wait_until(soon()) ? "" : "late";
  } catch (const Error& error) {
    return error.what();
  }
}

// Connects two ranks by a small message.
void connect(Group& group, int from, int to, int tag) {
  uint32_t value = 1, found = 0;
  const auto received = group[to].receive(from, tag, &found, 4);
  EXPECT_EQ(failure_of(*group[from].send(to, tag, &value, 4)), "");
  EXPECT_EQ(failure_of(*received), "");
  EXPECT_EQ(found, 1u);
}

TEST_F(MessagesTest, AllSizesArriveWhoeverIsFirst) {
  Group group(2);
  const size_t small = group[0].most_small();
  for (const bool receiver_first : {true, false}) {
    for (const size_t bytes : {size_t{0}, size_t{1}, size_t{100}, size_t{300}, small - 1, small, small + 1,
                               size_t{100'000}, size_t{3} << 20}) {
      const auto source = pattern(bytes, 3);
      std::vector<uint8_t> target(bytes, 0xee);
      Messages::MessagePtr sent, received;
      if (!receiver_first) sent = group[0].send(1, 5, source.data(), bytes);
      received = group[1].receive(0, 5, target.data(), bytes);
      if (receiver_first) sent = group[0].send(1, 5, source.data(), bytes);
      EXPECT_EQ(failure_of(*received), "");
      EXPECT_EQ(failure_of(*sent), "");
      EXPECT_EQ(source, target) << bytes;
    }
  }
}

// Three ranks and several tags, posted in any order except within a tag, with small and large messages mixed.
TEST_F(MessagesTest, TagsKeepTheirOrderAndDoNotMeet) {
  constexpr int kRanks = 3, kMessages = 60;
  Group group(kRanks, {8, 512});
  const auto bytes_of = [](int from, int to, int tag, int n) {
    std::minstd_rand random(from * 7919 + to * 104729 + tag * 31 + n);
    random();
    return random() % 3 == 0 ? random() % 9000 : random() % 400;
  };
  std::vector<std::thread> threads;
  for (int me = 0; me < kRanks; ++me) {
    threads.emplace_back([&, me] {
      std::vector<Messages::MessagePtr> all;
      std::vector<std::vector<uint8_t>> memory;
      struct Expected {
        size_t place;
        uint32_t seed;
      };
      std::vector<Expected> expected;
      memory.reserve(kRanks * 2 * kMessages * 2);
      for (int n = 0; n < kMessages; ++n) {
        for (int tag = 0; tag < 2; ++tag) {
          for (int peer = 0; peer < kRanks; ++peer) {
            if (peer == me) continue;
            const uint32_t seed_out = me * 1000 + tag * 100 + n, seed_in = peer * 1000 + tag * 100 + n;
            memory.push_back(pattern(bytes_of(me, peer, tag, n), seed_out));
            all.push_back(group[me].send(peer, tag, memory.back().data(), memory.back().size()));
            memory.emplace_back(bytes_of(peer, me, tag, n));
            expected.push_back({memory.size() - 1, seed_in});
            all.push_back(group[me].receive(peer, tag, memory.back().data(), memory.back().size()));
          }
        }
      }
      for (auto& one : all) EXPECT_EQ(failure_of(*one), "");
      for (const auto& [place, seed] : expected) EXPECT_EQ(memory[place], pattern(memory[place].size(), seed));
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(group[0].connections(), 2);
}

TEST_F(MessagesTest, FromAnyone) {
  Group group(3);
  for (const int from : {1, 2}) {
    connect(group, from, 0, 1);  // "any" includes only connected peers
    uint32_t value = 40 + from, found = 0;
    auto message = group[0].receive_any(9, &found, 4);
    EXPECT_EQ(failure_of(*group[from].send(0, 9, &value, 4)), "");
    EXPECT_EQ(failure_of(*message), "");
    EXPECT_EQ(found, value);
    EXPECT_EQ(message->source(), from);
  }
  uint32_t found = 0, value = 77;
  EXPECT_EQ(failure_of(*group[2].send(0, 9, &value, 4)), "");  // posted before any receive
  connect(group, 2, 0, 1);
  EXPECT_EQ(failure_of(*group[0].receive_any(9, &found, 4)), "");
  EXPECT_EQ(found, 77u);
  std::vector<uint8_t> large(10'000);
  EXPECT_NE(failure_of(*group[0].receive_any(9, large.data(), large.size())).find("too large"), std::string::npos);
}

TEST_F(MessagesTest, SizesThatDisagreeAreNamed) {
  Group group(2);
  std::vector<uint8_t> data(100);
  auto sent = group[0].send(1, 0, data.data(), 60);
  auto received = group[1].receive(0, 0, data.data(), 100);
  EXPECT_NE(failure_of(*received).find("rank 0 sends 60 bytes, and this rank expects 100"), std::string::npos);
  std::vector<uint8_t> from(20'000), to(30'000);
  received = group[1].receive(0, 0, to.data(), to.size());
  sent = group[0].send(1, 0, from.data(), from.size());
  EXPECT_NE(failure_of(*sent).find("this rank sends 20000 bytes to rank 1, which expects 30000"), std::string::npos);
}

TEST_F(MessagesTest, AWaitEndsAtItsDeadline) {
  Group group(2);
  uint32_t value = 0;
  auto received = group[1].receive(0, 0, &value, 4);
  EXPECT_FALSE(received->wait_until(Clock::now() + std::chrono::milliseconds(5)));
  EXPECT_EQ(failure_of(*group[0].send(1, 0, &value, 4)), "");
  EXPECT_EQ(failure_of(*received), "");
}

TEST_F(MessagesTest, ASmallReceiveMayBeGivenUp) {
  Group group(2);
  uint32_t value = 11, lost = 0, found = 0;
  auto first = group[1].receive(0, 0, &lost, 4);
  first->abort();
  EXPECT_NE(failure_of(*first).find("given up"), std::string::npos);
  first.reset();
  auto second = group[1].receive(0, 0, &found, 4);
  EXPECT_EQ(failure_of(*group[0].send(1, 0, &value, 4)), "");  // matches the first receive, which was given up
  value = 12;
  EXPECT_EQ(failure_of(*group[0].send(1, 0, &value, 4)), "");
  EXPECT_EQ(failure_of(*second), "");
  EXPECT_EQ(found, 12u);
  EXPECT_EQ(lost, 0u);
}

// The peer knows where to write, so the memory is safe only without the connection.
TEST_F(MessagesTest, ALargeReceiveThatIsGivenUpTakesItsConnection) {
  Group group(2);
  connect(group, 0, 1, 1);
  std::vector<uint8_t> memory(100'000, 0xaa);
  const auto source = pattern(memory.size(), 1);
  group[1].receive(0, 0, memory.data(), memory.size()).reset();
  EXPECT_NE(failure_of(*group[1].receive(0, 0, memory.data(), memory.size())).find("given up"), std::string::npos);
  auto sent = group[0].send(1, 0, source.data(), source.size());
  EXPECT_NE(failure_of(*sent), "");
  EXPECT_EQ(std::count(memory.begin(), memory.end(), 0xaa), 100'000);
}

TEST_F(MessagesTest, AbortEndsWhatWaitsAndWhatBegins) {
  Group group(2);
  uint32_t value = 0;
  std::vector<uint8_t> large(50'000);
  auto small = group[1].receive(0, 0, &value, 4), big = group[1].receive(0, 0, large.data(), large.size());
  auto any = group[1].receive_any(3, &value, 4);
  std::thread waiter([&] { EXPECT_NE(failure_of(*small).find("enough"), std::string::npos); });
  group[1].abort(Error(ErrorKind::aborted, "enough"));
  waiter.join();
  EXPECT_NE(failure_of(*big).find("enough"), std::string::npos);
  EXPECT_NE(failure_of(*any).find("enough"), std::string::npos);
  EXPECT_NE(failure_of(*group[1].send(0, 0, &value, 4)).find("enough"), std::string::npos);
}

// What it sent still counts. Pending receives end with an error that names it.
TEST_F(MessagesTest, APeerThatLeavesSaysSo) {
  Group group(2);
  uint32_t value = 5, found = 0;
  auto awaited = group[1].receive(0, 1, &found, 4);
  EXPECT_EQ(failure_of(*group[0].send(1, 0, &value, 4)), "");
  group[0].close(std::chrono::seconds(5));
  EXPECT_NE(failure_of(*awaited).find("rank 0 has left the group"), std::string::npos);
  EXPECT_EQ(failure_of(*group[1].receive(0, 0, &found, 4)), "");
  EXPECT_EQ(found, 5u);
  EXPECT_NE(failure_of(*group[1].receive(0, 0, &found, 4)).find("rank 0 has left"), std::string::npos);
}

// Like a killed process: its queue pairs vanish without a goodbye.
TEST_F(MessagesTest, APeerThatVanishesIsMissedByWhoWaits) {
  Group group(3);
  uint32_t value = 5;
  for (const int from : {0, 2}) connect(group, from, 1, 0);
  auto awaited = group[1].receive(0, 1, &value, 4);
  group[0].abort(Error(ErrorKind::aborted, "killed"));  // no goodbye: its queue pairs are in the error state
  const std::string text = failure_of(*awaited);
  EXPECT_NE(text.find("rank 0"), std::string::npos) << text;
  EXPECT_NE(text.find("did not answer"), std::string::npos) << text;
  connect(group, 2, 1, 0);  // others are not affected
}

TEST_F(MessagesTest, MalformedRecordsAreRejectedWithThePeersName) {
  Group group(3);
  group.store->set("rdma/0/1", std::vector<uint8_t>(128, 0xff));
  uint32_t value = 0;
  std::string text = failure_of(*group[1].receive(0, 0, &value, 4));
  EXPECT_NE(text.find("of rank 0: RDMA handle record rejected: magic is"), std::string::npos) << text;
  rdma::Endpoint lies;
  lies.from = 2;
  lies.to = 0;
  lies.size = 3;
  lies.pair = 77;
  lies.inbox = 4096;
  lies.slots = 64;
  lies.slot_bytes = 4096;
  group.store->set("rdma/2/1", lies.encode());
  text = failure_of(*group[1].receive(2, 0, &value, 4));
  EXPECT_NE(text.find("RDMA handle record of rank 2 rejected: it is of rank 2 for rank 0"), std::string::npos) << text;
}

TEST_F(MessagesTest, MemoryThatTheSystemDoesNotLockIsNamedWithItsLimit) {
  Group group(2);
  connect(group, 0, 1, 0);
  control().most_memory = 600;  // KiB, of which the rings take 512
  std::vector<uint8_t> large(1 << 20);
  const std::string text = failure_of(*group[1].receive(0, 0, large.data(), large.size()));
  EXPECT_NE(text.find("cannot register 1048576 bytes of memory with pretend0"), std::string::npos) << text;
  connect(group, 0, 1, 1);  // the connection still works
}

TEST_F(MessagesTest, LossAndFaultsOfCompletionsAreSurvived) {
  control().loss = 200;
  control().lose_completions = 3;
  control().swap_completions = 1;
  auto options = pretended_options();
  options.timeout = 11;
  Group group(2, {8, 512}, options);
  const auto talk = [&](int me) {
    std::vector<Messages::MessagePtr> all;
    std::vector<std::vector<uint8_t>> memory;
    memory.reserve(200);
    for (int n = 0; n < 100; ++n) {
      const size_t bytes = n % 4 == 0 ? 20'000 + n : 50 + n;
      memory.push_back(pattern(bytes, me * 100 + n));
      all.push_back(group[me].send(1 - me, 0, memory.back().data(), bytes));
      memory.emplace_back(bytes);
      all.push_back(group[me].receive(1 - me, 0, memory.back().data(), bytes));
    }
    for (auto& one : all) EXPECT_EQ(failure_of(*one), "");
    for (int n = 0; n < 100; ++n) EXPECT_EQ(memory[2 * n + 1], pattern(memory[2 * n].size(), (1 - me) * 100 + n));
  };
  std::thread other([&] { talk(1); });
  talk(0);
  other.join();
}

TEST_F(MessagesTest, ClosingWhileThePeerNeverCameIsQuick) {
  Group group(2);
  uint32_t value = 0;
  auto awaited = group[0].receive(1, 0, &value, 4);
  const auto began = Clock::now();
  group[0].close(std::chrono::seconds(60));
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(30));
  EXPECT_NE(failure_of(*awaited).find("shut down"), std::string::npos);
}

}  // namespace
}  // namespace ark::rdma_test
