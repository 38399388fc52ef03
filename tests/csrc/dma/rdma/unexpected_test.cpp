// Tests messages without a posted receive: how many are kept, who waits then, and the errors.
#include <thread>

#include "support.hpp"

namespace ark::rdma_test {
namespace {

using UnexpectedTest = RdmaTest;

constexpr size_t kMost = 16;
constexpr int kFlood = 1, kOther = 2;

std::string outcome_of(rdma::Message& message, Messages::Clock::time_point deadline = soon()) {
  try {
    return message.wait_until(deadline) ? "" : "late";
  } catch (const Error& error) {
    return error.what();
  }
}

// Numbered messages from rank 0 to rank 1, which nobody receives.
struct Flood {
  Flood(Group& group, size_t count, int tag = kFlood) : values(count) {
    for (size_t n = 0; n < count; ++n) {
      values[n] = n;
      sent.push_back(group[0].send(1, tag, &values[n], sizeof values[n]));
    }
  }
  std::vector<uint64_t> values;
  std::vector<Messages::MessagePtr> sent;
};

// Two connected ranks with few slots and little memory.
struct Pair : Group {
  Pair() : Group(2, {8, 512}, pretended_options(), kMost) {
    uint32_t value = 1, found = 0;
    const auto received = (*this)[1].receive(0, 9, &found, 4);
    EXPECT_EQ(outcome_of(*(*this)[0].send(1, 9, &value, 4)), "");
    EXPECT_EQ(outcome_of(*received), "");
  }
  bool reaches(size_t kept) {
    for (const auto deadline = soon(); Messages::Clock::now() < deadline;) {
      if ((*this)[1].kept(0) >= kept) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }
  std::string receives(int tag, uint64_t expected) {
    uint64_t found = ~uint64_t{0};
    const std::string told = outcome_of(*(*this)[1].receive(0, tag, &found, sizeof found));
    EXPECT_EQ(found, expected);
    return told;
  }
};

TEST_F(UnexpectedTest, AFloodWaitsAtItsSender) {
  Pair group;
  Flood flood(group, 500);
  ASSERT_TRUE(group.reaches(kMost));
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(group[1].kept(0), kMost);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // 16 are kept, 8 are in the slots and 8 in the sender's slots. The rest is not sent yet.
  EXPECT_EQ(outcome_of(*flood.sent[kMost - 1]), "");
  const std::string late = outcome_of(*flood.sent[kMost + 16], Messages::Clock::now());
  EXPECT_NE(
      late.find("rank 1 takes no more messages: its 8 slots are full, as when it has 16 that it has not received"),
      std::string::npos)
      << late;
  for (uint64_t n = 0; n < 500; ++n) {
    ASSERT_EQ(group.receives(kFlood, n), "");
    EXPECT_LE(group[1].kept(0), kMost);
  }
  for (auto& one : flood.sent) EXPECT_EQ(outcome_of(*one), "");
}

// A waiting rank receives what comes after a flood. Nothing is lost or reordered.
TEST_F(UnexpectedTest, WhoWaitsHearsWhatIsBehind) {
  Pair group;
  Flood flood(group, 100), other(group, 1, kOther);
  ASSERT_TRUE(group.reaches(kMost));
  EXPECT_EQ(group.receives(kOther, 0), "");
  for (uint64_t n = 0; n < 100; ++n) ASSERT_EQ(group.receives(kFlood, n), "");
  EXPECT_EQ(group[1].kept(0), 0u);
}

// A large message needs the peer's announcement, which comes after the flood.
TEST_F(UnexpectedTest, ALargeSendHearsItsAnnouncement) {
  Pair group;
  Flood flood(group, 100);
  const auto source = pattern(100'000, 5);
  std::vector<uint8_t> target(source.size());
  const auto received = group[0].receive(1, kOther, target.data(), target.size());
  ASSERT_TRUE(group.reaches(kMost));
  EXPECT_EQ(outcome_of(*group[1].send(0, kOther, source.data(), source.size())), "");
  EXPECT_EQ(outcome_of(*received), "");
  EXPECT_EQ(source, target);
  for (uint64_t n = 0; n < 100; ++n) ASSERT_EQ(group.receives(kFlood, n), "");
}

// Announcements of posted receives, whose sends never start, count as well, at 40 bytes each.
TEST_F(UnexpectedTest, AnnouncementsCountAsWell) {
  Pair group;
  std::vector<std::vector<uint8_t>> targets(100, std::vector<uint8_t>(1000));
  std::vector<Messages::MessagePtr> received;
  for (auto& target : targets) received.push_back(group[0].receive(1, kFlood, target.data(), target.size()));
  ASSERT_TRUE(group.reaches(kMost));
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(group[1].kept(0), kMost);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (size_t n = 0; n < targets.size(); ++n) {
    const auto source = pattern(1000, static_cast<uint32_t>(n));
    ASSERT_EQ(outcome_of(*group[1].send(0, kFlood, source.data(), source.size())), "");
    ASSERT_EQ(outcome_of(*received[n]), "");
    EXPECT_EQ(targets[n], source);
  }
}

TEST_F(UnexpectedTest, TooManyForOneWhoWaitsIsSaid) {
  Pair group;
  uint64_t never = 0;
  const auto waits = group[1].receive(0, kOther, &never, sizeof never);
  const size_t most = kMost * Messages::kWhereAwaited;
  Flood flood(group, most + 20);
  const std::string told = outcome_of(*waits);
  EXPECT_NE(told.find("rank 0 has sent 256 messages that this rank has not received, while this rank waits for another "
                      "of it"),
            std::string::npos)
      << told;
  EXPECT_NE(told.find("Receive messages in about the order in which they are sent"), std::string::npos) << told;
  EXPECT_LE(group[1].kept(0), most);
  EXPECT_EQ(group.receives(kFlood, 0), "");  // what was kept is still there
}

// The last messages of a rank that leaves are received, even if there was no room for them.
TEST_F(UnexpectedTest, WhatStoodInSlotsCountsWhenThePeerHasGone) {
  Pair group;
  Flood flood(group, kMost + 4);
  ASSERT_TRUE(group.reaches(kMost));
  EXPECT_EQ(outcome_of(*flood.sent.back()), "");
  group[0].close(std::chrono::seconds(5));
  for (uint64_t n = 0; n < kMost + 4; ++n) ASSERT_EQ(group.receives(kFlood, n), "");
  uint64_t found = 0;
  const std::string told = outcome_of(*group[1].receive(0, kFlood, &found, sizeof found));
  EXPECT_NE(told.find("rank 0 has left the group"), std::string::npos) << told;
}

}  // namespace
}  // namespace ark::rdma_test
