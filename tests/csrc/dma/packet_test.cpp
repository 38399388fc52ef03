// Tests packets between threads: data that signals itself, over slots that are rewritten many times.
#include "protocol/packet.hpp"

#include <gtest/gtest.h>

#include <set>
#include <thread>
#include <vector>

#include "slots.hpp"
#include "support/wait_until.hpp"

namespace ark::protocol {
namespace {

TEST(Packets, PlacesAreDistinctAndWithinTheSlot) {
  for (uint64_t bytes : {1u, 16u, 512u, 513u, 8192u, 20000u}) {
    std::set<uint64_t> places;
    for (uint64_t unit = 0; unit * 16 < bytes; ++unit) {
      for (uint64_t place : {packet_place(unit), packet_place(unit) + kPacketRow}) {
        EXPECT_TRUE(places.insert(place).second) << unit;
        EXPECT_EQ(place % 16, 0u);
        EXPECT_LE(place + 16, packet_bytes(bytes));
      }
    }
  }
}

TEST(Packets, AnOlderMessageIsNotTakenForTheNext) {
  std::vector<uint64_t> memory(packet_bytes(512) / 8);
  char* slot = reinterpret_cast<char*>(memory.data());
  uint64_t low = 0, high = 0;
  EXPECT_FALSE(load_unit_packets(slot, 3, low, high, 1)) << "memory is zero at first";
  store_unit_packets(slot, 3, 7, 8, 1);
  ASSERT_TRUE(load_unit_packets(slot, 3, low, high, 1));
  EXPECT_EQ(low, 7u);
  EXPECT_EQ(high, 8u);
  EXPECT_FALSE(load_unit_packets(slot, 3, low, high, 2));
  store_packet(slot + packet_place(3), 9, 2);
  EXPECT_FALSE(load_unit_packets(slot, 3, low, high, 2)) << "half of it is there";
}

// On the host, release and acquire order the data before the epoch. Both words are atomic, so ThreadSanitizer would not
// report them, but it checks the order by the ordinary word next to them.
TEST(Packets, AnEpochIsReleasedAndAcquired) {
  for (int round = 0; round < 50; ++round) {
    alignas(16) uint64_t packet[2] = {};
    uint64_t beside = 0;  // an ordinary word
    std::thread sender([&] {
      beside = 5;
      store_packet(packet, 7, 1);
    });
    uint64_t data = 0, epoch = 0;
    test::wait_until("a packet", [&] { return load_packet(packet, data, epoch), epoch == 1; });
    EXPECT_EQ(data, 7u);
    EXPECT_EQ(beside, 5u);
    sender.join();
  }
}

// Two threads per side, each with its own units. The message's size changes, and the ring wraps around many times.
TEST(Packets, MessagesArriveWholeOverManyRounds) {
  constexpr uint64_t kSlots = 4, kMost = 40, kMessages = 600;
  constexpr int kTeam = 2;
  const uint64_t slot_bytes = packet_bytes(kMost * 16);
  std::vector<uint64_t> memory(kSlots * slot_bytes / 8);
  char* slots = reinterpret_cast<char*>(memory.data());
  uint64_t unused = 0, credits[kTeam] = {}, wrong = 0;
  const auto units_of = [](uint64_t message) { return 1 + message * 7 % kMost; };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kTeam; ++rank) {
    threads.emplace_back([&, rank] {
      SlotWriter writer(&unused, &credits[rank], kSlots, 0);
      for (uint64_t n = 0; n < kMessages; ++n) {
        test::wait_until("a free slot", [&] { return writer.writable(); });
        for (uint64_t unit = rank; unit < units_of(n); unit += kTeam)
          store_unit_packets(slots + writer.slot() * slot_bytes, unit, n ^ unit, ~n ^ unit, n + 1);
        writer.count();
      }
    });
    threads.emplace_back([&, rank] {
      SlotReader reader(&unused, &credits[rank], kSlots, 0);
      for (uint64_t n = 0; n < kMessages; ++n) {
        for (uint64_t unit = rank; unit < units_of(n); unit += kTeam) {
          uint64_t low = 0, high = 0;
          const char* const slot = slots + reader.slot() * slot_bytes;
          test::wait_until("a packet", [&] { return load_unit_packets(slot, unit, low, high, n + 1); });
          if (low != (n ^ unit) || high != (~n ^ unit)) add_relaxed(wrong, uint64_t{1});
        }
        reader.count(), reader.tell();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0u);
}

}  // namespace
}  // namespace ark::protocol
