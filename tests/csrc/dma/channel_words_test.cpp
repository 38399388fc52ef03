// Tests the words of a channel between threads that stand for two GPUs, so that ThreadSanitizer detects wrong ordering.
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <thread>
#include <vector>

#include "slots.hpp"
#include "support/night.hpp"
#include "support/wait_until.hpp"

namespace ark::protocol {
namespace {

constexpr uint64_t kWords = 64;  // per message

uint64_t word_of(uint64_t message, uint64_t i) {
  return (message + 1) * 0x9e3779b97f4a7c15ull ^ i;
}

struct Memory {
  explicit Memory(uint64_t slots) : slots(slots), data(slots * kWords) {}
  const uint64_t slots;
  std::vector<uint64_t> data;  // ordinary words, so that races on them are detected
  alignas(64) uint64_t arrived = 0;
  alignas(64) uint64_t credit = 0;
};

// Connects a sender of `team` threads with a receiver of as many, like blocks on two GPUs. `exact`: one thread checks
// the credit of each message instead of half a ring at a time.
void exchange(Memory& memory, int team, uint64_t first, uint64_t count, bool exact) {
  std::barrier send_barrier(team), receive_barrier(team);
  std::vector<std::thread> threads;
  uint64_t wrong = 0;
  for (int rank = 0; rank < team; ++rank) {
    threads.emplace_back([&, rank] {
      SlotWriter writer(&memory.arrived, &memory.credit, memory.slots, first);
      for (uint64_t n = first; n < first + count; ++n) {
        ASSERT_EQ(writer.sent(), n);
        const uint64_t due = exact ? needed_to_write(n, memory.slots) : writer.due();
        if (due != 0) {
          if (rank == 0) test::wait_until("credits", [&] { return writer.taken(due); });
          send_barrier.arrive_and_wait();
        }
        for (uint64_t i = rank; i < kWords; i += team) memory.data[writer.slot() * kWords + i] = word_of(n, i);
        send_barrier.arrive_and_wait();
        writer.count();
        if (rank == 0) writer.tell();
      }
      if (rank == 0) test::wait_until("all credits", [&] { return writer.taken(first + count); });
    });
    threads.emplace_back([&, rank] {
      SlotReader reader(&memory.arrived, &memory.credit, memory.slots, first);
      for (uint64_t n = first; n < first + count; ++n) {
        if (rank == 0) test::wait_until("a message", [&] { return reader.there(); });
        receive_barrier.arrive_and_wait();
        uint64_t bad = 0;
        for (uint64_t i = rank; i < kWords; i += team) bad += memory.data[reader.slot() * kWords + i] != word_of(n, i);
        if (bad != 0) add_relaxed(wrong, bad);
        reader.count();
        receive_barrier.arrive_and_wait();
        if (rank == 0) reader.tell();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(memory.arrived, first + count);
  EXPECT_EQ(memory.credit, first + count);
}

TEST(ChannelWords, MessagesArriveWholeOverManyRounds) {
  const int many = test::cases(400);
  for (uint64_t slots : {1, 2, 3, 8}) {
    for (int team : {1, 2}) {
      Memory memory(slots);
      exchange(memory, team, 0, many, false);
      exchange(memory, team, many, 101, false);  // the next launch, in the middle of the ring
      exchange(memory, team, many + 101, 100, true);
    }
  }
}

TEST(ChannelWords, AFullRingIsNotWritable) {
  Memory memory(3);
  SlotWriter writer(&memory.arrived, &memory.credit, 3, 0);
  SlotReader reader(&memory.arrived, &memory.credit, 3, 0);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(writer.writable());
    writer.count(), writer.tell();
  }
  EXPECT_FALSE(writer.writable());
  EXPECT_FALSE(writer.taken(1));
  EXPECT_TRUE(reader.there());
  reader.count();
  EXPECT_FALSE(writer.writable()) << "not told yet";
  reader.tell();
  EXPECT_TRUE(writer.writable());
  EXPECT_EQ(writer.slot(), 0u);
  EXPECT_FALSE(writer.taken(3));
  reader.count(), reader.count(), reader.tell();
  EXPECT_TRUE(writer.taken(3));
  EXPECT_FALSE(reader.there()) << "nothing was sent behind the third";
}

TEST(ChannelWords, HalfARingAtATimeIsAlwaysEnough) {
  for (uint64_t slots = 1; slots <= 17; ++slots) {
    uint64_t credit = 0;
    for (uint64_t message = 0; message < 200; ++message) {
      const uint64_t due = credit_of_half(message, slots);
      credit = std::max(credit, due);
      EXPECT_GE(credit, needed_to_write(message, slots)) << message << " of " << slots;
      EXPECT_LE(due, message) << "it would wait for a message that was not sent";
    }
  }
}

}  // namespace
}  // namespace ark::protocol
