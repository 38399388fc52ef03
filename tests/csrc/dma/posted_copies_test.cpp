// Tests copies posted ahead, with a thread in place of the stream: it waits for 1, writes 0, copies and writes 1.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "collectives/cuda/fake_driver.hpp"
#include "copy_poster.hpp"
#include "flag.hpp"
#include "slots.hpp"
#include "support/wait_until.hpp"
#include "util/error.hpp"

namespace ark::protocol {
namespace posted_copies_test {

constexpr uint64_t kSlots = 3, kWords = 50;

struct Channel {
  Flag go[kSlots] = {}, arrived[kSlots] = {};
  uint64_t credit = 0;
  std::vector<uint64_t> source = std::vector<uint64_t>(kSlots * kWords), there = source;
  std::atomic<bool> abort{false};

  // Runs the stream of `count` posts. Returns how many ran.
  uint64_t stream(uint64_t count) {
    for (uint64_t n = 0; n < count; ++n) {
      const uint64_t slot = n % kSlots;
      test::wait_until("a release", [&] { return is_raised(go[slot]); });
      lower(go[slot]);
      for (uint64_t i = slot * kWords; i < (slot + 1) * kWords && !abort; ++i) there[i] = source[i];
      raise(arrived[slot]);
    }
    return count;
  }
  void sender(uint64_t first, uint64_t count) {
    uint64_t unused = 0;
    SlotWriter writer(&unused, &credit, kSlots, first);
    for (uint64_t n = first; n < first + count; ++n) {
      test::wait_until("a free slot", [&] { return writer.writable(); });
      for (uint64_t i = 0; i < kWords; ++i) source[writer.slot() * kWords + i] = n * 1000 + i;
      raise(go[writer.slot()]);
      writer.count();
    }
    test::wait_until("all credits", [&] { return writer.taken(first + count); });
  }
  uint64_t receiver(uint64_t first, uint64_t count) {
    uint64_t wrong = 0;
    for (uint64_t n = first; n < first + count; ++n) {
      Flag& flag = arrived[n % kSlots];
      test::wait_until("a copy", [&] { return is_raised(flag); });
      for (uint64_t i = 0; i < kWords; ++i) wrong += there[n % kSlots * kWords + i] != n * 1000 + i;
      lower(flag);
      store_release(credit, n + 1);
    }
    return wrong;
  }
};

TEST(PostedCopies, AGraphThatIsReplayedFindsItsFlagsArmed) {
  Channel channel;
  constexpr uint64_t kPosts = 2 * kSlots, kReplays = 150;
  for (uint64_t replay = 0; replay < kReplays; ++replay) {
    uint64_t wrong = 0;
    std::thread stream([&] { channel.stream(kPosts); });
    std::thread sender([&] { channel.sender(replay * kPosts, kPosts); });
    std::thread receiver([&] { wrong = channel.receiver(replay * kPosts, kPosts); });
    for (std::thread* thread : {&stream, &sender, &receiver}) thread->join();
    ASSERT_EQ(wrong, 0u);
    for (uint64_t i = 0; i < kSlots; ++i) {
      ASSERT_FALSE(is_raised(channel.go[i]));
      ASSERT_FALSE(is_raised(channel.arrived[i]));
    }
  }
}

// CopyPoster::release_all(): raising a flag once is not enough, since each wait lowers it.
TEST(PostedCopies, AnAbortReleasesEveryWait) {
  Channel channel;
  constexpr uint64_t kPosts = 5 * kSlots + 1;
  std::atomic<uint64_t> ran{0};
  std::thread stream([&] { ran = channel.stream(kPosts); });
  channel.abort = true;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (ran == 0 && std::chrono::steady_clock::now() < until) {
    for (Flag& flag : channel.go) raise(flag);
    std::this_thread::yield();
  }
  EXPECT_EQ(ran, kPosts);
  stream.join();
}

// The fake driver plus memory shared by host and device.
const Driver& driver_with_pinned_memory() {
  static const Driver table = [] {
    Driver made = test::fake_driver();
    made.mem_host_alloc = [](void** out, size_t bytes, unsigned) {
      return *out = std::aligned_alloc(64, (bytes + 63) / 64 * 64), CUDA_SUCCESS;
    };
    made.mem_host_get_device_pointer = [](CUdeviceptr* out, void* host, unsigned) {
      return *out = reinterpret_cast<CUdeviceptr>(host), CUDA_SUCCESS;
    };
    made.mem_free_host = [](void* host) { return std::free(host), CUDA_SUCCESS; };
    made.stream_write_value32 = [](CUstream stream, CUdeviceptr at, uint32_t value, unsigned) {
      test::of(stream).give([=] { store_release(test::word_at(at), value); });
      return CUDA_SUCCESS;
    };
    return made;
  }();
  return table;
}

TEST(CopyPoster, EveryMessageHasItsSlotAndWaitsForItsFlag) {
  use_driver(driver_with_pinned_memory());
  std::vector<Flag> arrived(kSlots);
  std::vector<uint64_t> source(kSlots * kWords), there(kSlots * kWords);
  CopyPoster poster(0, kSlots, arrived.data());
  for (uint64_t n = 0; n < 4 * kSlots + 1; ++n) {
    const uint64_t slot = n % kSlots;
    const auto word_of = [&](uint64_t i) { return n * 1000 + i; };
    for (uint64_t i = 0; i < kWords; ++i) source[slot * kWords + i] = word_of(i);
    poster.post(&there[slot * kWords], &source[slot * kWords], kWords * sizeof(uint64_t));
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    ASSERT_FALSE(is_raised(arrived[slot])) << "nobody has raised its flag yet";
    raise(poster.go()[slot]);
    test::wait_until("a copy", [&] { return is_raised(arrived[slot]); });
    for (uint64_t i = 0; i < kWords; ++i) ASSERT_EQ(there[slot * kWords + i], word_of(i));
    ASSERT_FALSE(is_raised(poster.go()[slot])) << "armed again";
    lower(arrived[slot]);
  }
  poster.synchronize();
}

TEST(CopyPoster, AnAbortEndsAllWaitsInItsTime) {
  use_driver(driver_with_pinned_memory());
  std::vector<Flag> arrived(kSlots);
  uint64_t word = 0, copied = 0;
  CopyPoster poster(0, kSlots, arrived.data());
  for (uint64_t n = 0; n < 2 * kSlots + 1; ++n) poster.post(&copied, &word, sizeof word);
  EXPECT_FALSE(poster.release_all(std::chrono::milliseconds(-1))) << "there was no time";
  EXPECT_TRUE(poster.release_all(std::chrono::seconds(60)));
  EXPECT_THROW(CopyPoster(0, 0, arrived.data()), Error);
}

}  // namespace posted_copies_test
}  // namespace ark::protocol
