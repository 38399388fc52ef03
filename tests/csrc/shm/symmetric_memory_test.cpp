// Tests GPU memory between processes on the pretended driver: the pool's table, meetings, and buffers mapped by all
// ranks.
#include "shm/symmetric_memory.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "cuda/shareable_pool.hpp"
#include "shm/shared_pinned_memory.hpp"
#include "shm/support.hpp"
#include "support/pretended_driver.hpp"

namespace ark::test {
namespace symmetric_memory_test {

constexpr size_t kMegabyte = 1 << 20;

TEST(ShareablePool, KnowsWhatLiesInItsSegments) {
  const Pretended before = pretended();
  char* const first = static_cast<char*>(ark_pool_alloc(3 * kMegabyte, 0, nullptr));
  char* const second = static_cast<char*>(ark_pool_alloc(2 * kMegabyte, 1, nullptr));
  ASSERT_NE(first, nullptr);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(count_shareable(), 2u);
  const auto held = find_shareable(first + 100, 3 * kMegabyte - 100);
  ASSERT_NE(held, nullptr);
  EXPECT_EQ(held->memory.data(), first);
  EXPECT_EQ(held->device, 0);
  EXPECT_EQ(find_shareable(second, 1)->device, 1);
  EXPECT_NE(find_shareable(second, 1)->number, held->number);
  EXPECT_EQ(find_shareable(first, held->memory.size() + 1), nullptr);
  EXPECT_EQ(find_shareable(&held, 1), nullptr);
  ark_pool_free(second, 0, 1, nullptr);
  EXPECT_EQ(find_shareable(second, 1), nullptr);
  EXPECT_EQ(count_shareable(), 1u);
  ark_pool_free(first, 0, 0, nullptr);
  EXPECT_EQ(find_shareable(first, 1), nullptr);
  first[5] = 7;  // still held, so still mapped
  EXPECT_EQ(pretended().mappings, before.mappings + 1);
  const_cast<std::shared_ptr<const ShareableSegment>&>(held).reset();
  EXPECT_EQ(pretended(), before);
}

TEST(ShareablePool, GivesNothingWhereThereIsTooLittle) {
  const Pretended before = pretended();
  EXPECT_EQ(ark_pool_alloc(ssize_t{2} << 30, 0, nullptr), nullptr);
  EXPECT_EQ(ark_pool_alloc(0, 0, nullptr), nullptr);
  fail_mappings(1);
  EXPECT_THROW(ark_pool_alloc(kMegabyte, 0, nullptr), Error);
  EXPECT_EQ(pretended(), before);
  ark_pool_free(nullptr, 0, 0, nullptr);
  EXPECT_EQ(count_shareable(), 0u);
}

// Where the driver offers it; where it then refuses, memory is for GPUs alone.
TEST(ShareablePool, IsMadeForNicsToo) {
  const auto made_for_nics = [] {
    const int before = allocated_for_nics();
    void* const memory = ark_pool_alloc(kMegabyte, 0, nullptr);
    EXPECT_NE(memory, nullptr);
    ark_pool_free(memory, 0, 0, nullptr);
    return allocated_for_nics() - before;
  };
  EXPECT_EQ(made_for_nics(), 1);
  pretend_memory_for_nics(0);
  EXPECT_EQ(made_for_nics(), 0);
  pretend_memory_for_nics(1);
  refuse_nics(true);
  EXPECT_EQ(made_for_nics(), 0);
  refuse_nics(false);
}

MemoryMeeting::Options meeting_of(int rank, int size, milliseconds timeout = milliseconds(20000)) {
  return {rank, size, timeout, "meeting", [] {}};
}

std::unique_ptr<MemoryMeeting> join(const TemporaryDirectory& directory, const MemoryMeeting::Options& options) {
  DirectoryStore store(directory.path());
  std::string why;
  auto meeting = MemoryMeeting::join(store, options, why);
  if (!meeting) throw Error(ErrorKind::system, why);
  return meeting;
}

SymmetricMemory::Options buffer_of(int rank, int size, int device, size_t bytes) {
  SymmetricMemory::Options options;
  options.rank = rank, options.size = size, options.device = device, options.bytes = bytes;
  options.timeout = milliseconds(20000);
  options.name = "buffer";
  options.check = [] {};
  return options;
}

class GroupSize : public testing::TestWithParam<int> {};

TEST_P(GroupSize, EveryRankMapsEveryBuffer) {
  const int size = GetParam();
  TemporaryDirectory directory;
  Ranks ranks(size, [&](int rank) -> std::string {
    const Pretended before = pretended();
    DirectoryStore store(directory.path());
    SymmetricMemory::Options options = buffer_of(rank, size, rank, 3 * kMegabyte);
    std::string why;
    auto memory = SymmetricMemory::create(store, options, why);
    if (memory.empty()) return why;
    for (int peer = 0; peer < size; ++peer) {
      if (memory[peer].size() != 4 * kMegabyte) return "wrong size";
      memory[peer].data()[100 + rank] = static_cast<char>(1 + rank);
    }
    auto meeting = join(directory, meeting_of(rank, size));
    meeting->step([] {});
    for (int peer = 0; peer < size; ++peer)
      if (memory[rank].data()[100 + peer] != 1 + peer) return "rank " + std::to_string(peer) + " is not heard";
    memory.clear();
    return pretended() == before ? "shared" : "something is left";
  });
  expect_all(ranks.wait(), "shared");
}

INSTANTIATE_TEST_SUITE_P(OneToFour, GroupSize, testing::Range(1, 5));

TEST_P(GroupSize, EveryRankMapsEveryHostsPart) {
  const int size = GetParam();
  TemporaryDirectory directory;
  Ranks ranks(size, [&](int rank) -> std::string {
    const Pretended before = pretended();
    auto meeting = join(directory, meeting_of(rank, size));
    std::string why;
    const auto prepare = [&](void* own) { static_cast<char*>(own)[0] = static_cast<char>(10 + rank); };
    auto memory = SharedPinnedMemory::create(*meeting, rank, 8192, prepare, why);
    if (!memory) return why;
    for (int peer = 0; peer < size; ++peer) {
      char* const part = static_cast<char*>(memory->host(peer));
      if (memory->device(peer) != reinterpret_cast<CUdeviceptr>(part)) return "the device sees another";
      if (part[0] != 10 + peer || part[8191] != 0) return "not prepared";
      part[100 + rank] = static_cast<char>(1 + rank);
    }
    if (pretended().registered != size) return "not registered";
    meeting->step([] {});
    for (int peer = 0; peer < size; ++peer)
      if (static_cast<char*>(memory->host(rank))[100 + peer] != 1 + peer)
        return "rank " + std::to_string(peer) + " is not heard";
    meeting.reset();
    static_cast<char*>(memory->host(size - 1))[0] = 0;  // stays mapped whatever happened to its owner
    memory.reset();
    return pretended() == before ? "shared" : "something is left";
  });
  expect_all(ranks.wait(), "shared");
}

TEST(SharedPinnedMemory, OneRankThatCannotRegisterIsAnAnswerForAll) {
  TemporaryDirectory directory;
  Ranks ranks(3, [&](int rank) -> std::string {
    const Pretended before = pretended();
    auto meeting = join(directory, meeting_of(rank, 3));
    if (rank == 1) fail_mappings(1);
    std::string why;
    const auto memory = SharedPinnedMemory::create(
        *meeting, rank, 4096, [](void*) {}, why);
    if (memory) return "shared";
    if (pretended() != before) return "something is left";
    return why.substr(why.find("cuMemHostRegister"), 17) + (rank == 1 ? "" : why.substr(0, 7));
  });
  const auto& results = ranks.wait();
  EXPECT_EQ(results[0].text, "cuMemHostRegisterrank 1:");
  EXPECT_EQ(results[1].text, "cuMemHostRegister");
  EXPECT_EQ(results[2].text, "cuMemHostRegisterrank 1:");
}

TEST(SymmetricMemory, OneRankThatCannotAllocateIsAnAnswerForAll) {
  TemporaryDirectory directory;
  Ranks ranks(3, [&](int rank) -> std::string {
    DirectoryStore store(directory.path());
    if (rank == 1) fail_mappings(1);
    std::string why;
    const auto memory = SymmetricMemory::create(store, buffer_of(rank, 3, rank, kMegabyte), why);
    return memory.empty() ? why.substr(why.find("cuMemMap"), 8) + (rank == 1 ? "" : why.substr(0, 7)) : "shared";
  });
  const auto& results = ranks.wait();
  EXPECT_EQ(results[0].text, "cuMemMaprank 1:");
  EXPECT_EQ(results[1].text, "cuMemMap");
  EXPECT_EQ(results[2].text, "cuMemMaprank 1:");
}

TEST(SymmetricMemory, OneGpuForTwoRanksIsAnErrorOnAll) {
  TemporaryDirectory directory;
  Ranks ranks(3, [&](int rank) -> std::string {
    DirectoryStore store(directory.path());
    std::string why;
    SymmetricMemory::create(store, buffer_of(rank, 3, rank / 2, kMegabyte), why);
    return "shared";
  });
  for (const Result& result : ranks.wait()) {
    EXPECT_TRUE(contains(result.text, "Error(invalid_argument")) << result.text;
    EXPECT_TRUE(contains(result.text, "rank 1 uses the same GPU as rank 0")) << result.text;
    EXPECT_TRUE(contains(result.text, "set_device")) << result.text;
  }
}

TEST(MemoryMeeting, WhatFailsOnOneRankFailsOnAllAndTheNextStepIsNew) {
  TemporaryDirectory directory;
  Ranks ranks(3, [&](int rank) -> std::string {
    auto meeting = join(directory, meeting_of(rank, 3));
    std::string heard;
    for (int step = 0; step < 6; ++step) {
      const int failing = step % 3;
      std::string why;
      try {
        const bool good = meeting->step(
            [&] {
              meeting->own_card<int>() = 100 * step + rank;
              if (step >= 4) return;
              if (rank == failing) {
                throw Error(step == 3 ? ErrorKind::system : ErrorKind::type_error, "no " + std::to_string(step),
                            ErrorContext{-1, -1, "", 0, "Mend it."});
              }
              // The others give memory that nobody takes. The next steps must skip it.
              const DeviceMemory memory = DeviceMemory::allocate(rank, kMegabyte);
              for (int peer = 0; peer < 3; ++peer)
                if (peer != rank) meeting->give(peer, memory.export_fd());
              for (int peer = 0; peer < 3; ++peer)
                if (peer != rank) meeting->take(peer);
            },
            why);
        if (step == 3) {
          if (good || !contains(why, "no 3. Mend it.")) return "step 3: " + why;
          continue;
        }
        if (!good || step < 4) return "step " + std::to_string(step);
      } catch (const Error& error) {
        if (step > 2 || error.kind() != ErrorKind::type_error || error.context().peer != failing) return error.what();
        if (!contains(error.what(), "no " + std::to_string(step) + ". Mend it.")) return error.what();
      }
      for (int peer = 0; peer < 3 && step >= 4; ++peer)
        if (meeting->card_of<int>(peer) != 100 * step + peer) return "card of step " + std::to_string(step);
    }
    std::string result = "alike";
    meeting->step([&] {
      const DeviceMemory memory = DeviceMemory::allocate(rank, kMegabyte);
      memory.data()[0] = static_cast<char>(40 + rank);
      SymmetricMemory::share(*meeting, memory, [&](int peer, UniqueFd fd) {
        if (DeviceMemory::import(rank, fd, 2 * kMegabyte).data()[0] != 40 + peer) result = "another's memory";
      });
    });
    return result;
  });
  expect_all(ranks.wait(), "alike");
}

TEST(MemoryMeeting, ARankThatDoesNotComeIsNamed) {
  TemporaryDirectory directory;
  Ranks ranks(3, [&](int rank) -> std::string {
    auto meeting = join(directory, meeting_of(rank, 3, milliseconds(rank == 2 ? 20000 : 700)));
    meeting->step([] {});
    if (rank == 2) std::this_thread::sleep_for(milliseconds(1500));
    try {
      meeting->step([] {});
      return "came";
    } catch (const Error& error) {
      try {
        meeting->step([] {});
      } catch (const Error& again) {
        return std::string(name_of(error.kind())) + " " + std::to_string(error.context().peer) + " " +
               name_of(again.kind());
      }
      return "went on";
    }
  });
  const auto& results = ranks.wait();
  EXPECT_EQ(results[0].text, "timeout 2 closed");
  EXPECT_EQ(results[1].text, "timeout 2 closed");
  EXPECT_EQ(results[2].text, "mismatch 0 closed");  // it came after they had left
}

TEST(MemoryMeeting, ARankThatDiesIsNamed) {
  TemporaryDirectory directory;
  Ranks ranks(3, [&](int rank) -> std::string {
    auto meeting = join(directory, meeting_of(rank, 3));
    meeting->step([&] {
      if (rank == 1) ::raise(SIGKILL);
    });
    return "came";
  });
  const auto& results = ranks.wait();
  for (int rank : {0, 2}) {
    EXPECT_TRUE(contains(results[rank].text, "Error(peer_lost, peer 1)")) << results[rank].text;
    EXPECT_LT(results[rank].seconds, 5);
  }
}

}  // namespace symmetric_memory_test
}  // namespace ark::test
