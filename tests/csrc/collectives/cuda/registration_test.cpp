// Tests registration between processes on the pretended driver: windows show every rank's memory at any offset of its
// segment, all ranks get the same errors, and nothing leaks.
#include "collectives/cuda/registration.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "shm/support.hpp"
#include "support/pretended_driver.hpp"

namespace ark::test {
namespace {

constexpr size_t kMegabyte = 1 << 20;

// One rank's registration, its windows, and memory of its pool.
struct Member {
  Member(const TemporaryDirectory& directory, int rank_, int size_)
      : rank(rank_), size(size_), registration(meeting_in(directory)) {}

  std::unique_ptr<MemoryMeeting> meeting_in(const TemporaryDirectory& directory) {
    DirectoryStore store(directory.path());
    std::string why;
    auto meeting = MemoryMeeting::join(store, {rank, size, milliseconds(20000), "registration", [] {}}, why);
    if (!meeting) throw Error(ErrorKind::system, why);
    return meeting;
  }
  char* allocate(size_t bytes) {
    return static_cast<char*>(ark_pool_alloc(static_cast<ssize_t>(bytes), rank, nullptr));
  }
  Registration::Offer offer(char* data, uint64_t bytes) {
    return [=] {
      auto segment = find_shareable(data, bytes);
      if (!segment) throw Error(ErrorKind::invalid_argument, "not from the pool");
      return RegisteredRange{data, bytes, std::move(segment)};
    };
  }
  uint32_t add(char* data, uint64_t bytes) {
    return registration.add(offer(data, bytes), [this] { return &windows; });
  }
  void remove(char* data, uint64_t bytes) {
    registration.remove([=] { return RegisteredRange{data, bytes, nullptr}; }, &windows, [this] { return quiet; });
  }
  // Waits until all ranks are there, by registering an empty pool.
  void meet() {
    registration.add_all([] { return std::vector<RegisteredRange>(); }, [this] { return &windows; });
  }

  const int rank, size;
  bool quiet = true;
  Windows windows;
  Registration registration;
};

std::string see_everyone(Member& me, char* own, uint64_t bytes, uint32_t id) {
  const auto found = me.windows.find(own, bytes);
  if (!found || found->id != id || found->offset != 0) return "no window " + std::to_string(id);
  if (found->base[me.rank] != own) return "own memory elsewhere";
  const Windows::Base& seen = found->seen;
  std::memset(own, 0, bytes);
  me.meet();
  for (int peer = 0; peer < me.size; ++peer) found->base[peer][me.rank] = static_cast<char>(1 + me.rank);
  for (int peer = 0; peer < me.size; ++peer) found->base[peer][bytes - 1 - me.rank] = static_cast<char>(50 + me.rank);
  me.meet();
  for (int peer = 0; peer < me.size; ++peer) {
    if (own[peer] != 1 + peer || own[bytes - 1 - peer] != 50 + peer)
      return "rank " + std::to_string(peer) + " writes elsewhere";
  }
  // Every rank was told where it has this rank's memory mapped. It checks what it sees by reporting it back.
  me.meet();
  for (int peer = 0; peer < me.size; ++peer) {
    const auto address = reinterpret_cast<uintptr_t>(seen[peer]);
    std::memcpy(found->base[peer] + 8 * me.rank, &address, 8);
  }
  me.meet();
  for (int peer = 0; peer < me.size; ++peer) {
    uintptr_t told;
    std::memcpy(&told, own + 8 * peer, 8);
    if (told != reinterpret_cast<uintptr_t>(found->base[peer])) return "rank " + std::to_string(peer) + " sees another";
  }
  me.meet();
  return {};
}

TEST(Registration, ShowsEveryRanksMemoryWhereverItLies) {
  TemporaryDirectory directory;
  Ranks ranks(4, [&](int rank) -> std::string {
    Member me(directory, rank, 4);
    char* const segment = me.allocate((8 + 2 * static_cast<size_t>(rank)) * kMegabyte);
    uint32_t id = 0;
    for (const uint64_t bytes : {uint64_t{1000}, 3 * kMegabyte + 17}) {
      char* const own = segment + 512 * static_cast<size_t>(1 + rank) + id * kMegabyte;
      if (me.add(own, bytes) != ++id) return "another id";
      if (std::string wrong = see_everyone(me, own, bytes, id); !wrong.empty()) return wrong;
      const auto slice = me.windows.find(own + 100, 10);
      if (!slice || slice->id != id || slice->offset != 100) return "no slice";
      if (me.windows.find(own - 1, 10)) return "more than was registered";
    }
    return "seen";
  });
  expect_all(ranks.wait(), "seen");
}

TEST(Registration, MapsASegmentOnceAndGivesAllBack) {
  TemporaryDirectory directory;
  Ranks ranks(3, [&](int rank) -> std::string {
    Member me(directory, rank, 3);
    char* const one = me.allocate(8 * kMegabyte);
    char* const other = me.allocate(8 * kMegabyte);
    const Pretended before = pretended();
    for (int round = 0; round < 50; ++round) {
      // Rank 0's ranges are in one segment, the others' in two.
      char* const second = rank == 0 ? one + 4 * kMegabyte : other;
      me.add(one, kMegabyte);
      if (pretended().mappings != before.mappings + 2) return "not one mapping a peer";
      me.add(second, kMegabyte);
      if (pretended().mappings != before.mappings + (rank == 0 ? 4 : 3)) return "mapped again";
      me.add(one + kMegabyte, 5);
      if (pretended().mappings != before.mappings + (rank == 0 ? 4 : 3)) return "mapped for nothing";
      if (me.windows.bytes() != 2 * kMegabyte + 5) return "wrong sum of bytes";
      me.remove(one, kMegabyte);
      me.remove(one + kMegabyte, 5);
      me.remove(second, kMegabyte);
      if (!(pretended() == before)) return "something is left in round " + std::to_string(round);
      if (me.windows.size() != 0 || me.windows.find(one, 1)) return "still found";
    }
    me.add(one, kMegabyte);
    if (me.windows.find(one, 1)->id != 151) return "ids are used again";
    me.windows.clear();  // the group ends
    return pretended() == before ? "flat" : "the end leaves something";
  });
  expect_all(ranks.wait(), "flat");
}

TEST(Registration, MemoryFreedMeanwhileStaysWhereItIs) {
  TemporaryDirectory directory;
  Ranks ranks(2, [&](int rank) -> std::string {
    const Pretended before = pretended();
    Member me(directory, rank, 2);
    char* const own = me.allocate(2 * kMegabyte);
    me.add(own, kMegabyte);
    ark_pool_free(own, 2 * kMegabyte, rank, nullptr);
    for (int i = 0; i < 5; ++i) {
      char* const later = me.allocate(2 * kMegabyte);
      if (later <= own && own < later + 2 * kMegabyte) return "its address was given away";
      if (me.windows.find(later, 1)) return "other memory is thought to be registered";
      ark_pool_free(later, 2 * kMegabyte, rank, nullptr);
    }
    if (std::string wrong = see_everyone(me, own, kMegabyte, 1); !wrong.empty()) return wrong;
    try {
      me.add(own, kMegabyte);
      return "registered again";
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::invalid_argument) return error.what();
    }
    me.remove(own, kMegabyte);
    return pretended() == before ? "held" : "something is left";
  });
  expect_all(ranks.wait(), "held");
}

TEST(Registration, FailsOnAllRanksAlike) {
  TemporaryDirectory directory;
  Ranks ranks(3, [&](int rank) -> std::string {
    Member me(directory, rank, 3);
    char* const own = me.allocate(4 * kMegabyte);
    char elsewhere[16];
    const Pretended before = pretended();
    std::string told;
    const auto expect = [&](ErrorKind kind, const std::string& part, const std::function<void()>& call) {
      try {
        call();
        told += "no error: " + part + "; ";
      } catch (const Error& error) {
        if (error.kind() != kind || !contains(error.what(), part)) told += error.what() + std::string("; ");
      }
      if (!(pretended() == before)) told += "left by: " + part + "; ";
    };
    expect(ErrorKind::invalid_argument, "not from the pool", [&] { me.add(rank == 1 ? elsewhere : own, 16); });
    expect(ErrorKind::mismatch, "rank 0 gave 100 bytes, rank 2 gave 104 bytes",
           [&] { me.add(own, rank == 2 ? 104 : 100); });
    expect(ErrorKind::invalid_argument, "not registered with this group", [&] { me.remove(own, 16); });
    expect(ErrorKind::system, "cuMemMap", [&] {
      if (rank == 0) fail_mappings(1);
      me.add(own, 16);
    });
    expect(ErrorKind::invalid_argument, "wrong device", [&] {
      me.registration.add(me.offer(own, 16), [&]() -> Windows* {
        if (rank == 2) throw Error(ErrorKind::invalid_argument, "wrong device");
        return &me.windows;
      });
    });
    const uint32_t first = me.add(own, 16), second = me.add(own + 100, 16);
    if (first == 0 || second != first + 1) told += "ids; ";
    try {
      me.remove(own + (rank == 0 ? 0 : 100), 16);
      told += "another window; ";
    } catch (const Error& error) {
      if (!contains(error.what(), "gave another")) told += error.what();
    }
    try {
      rank == 1 ? me.remove(own, 16) : void(me.add(own, 16));
      told += "two calls; ";
    } catch (const Error& error) {
      if (!contains(error.what(), "rank 0 called register, rank 1 called deregister")) told += error.what();
    }
    if (me.windows.size() != 2) told += "a window is gone; ";
    me.remove(own, 16);
    me.remove(own + 100, 16);
    return told.empty() && pretended() == before ? "alike" : told;
  });
  expect_all(ranks.wait(), "alike");
}

TEST(Registration, OfManyIsAllOrNone) {
  TemporaryDirectory directory;
  Ranks ranks(2, [&](int rank) -> std::string {
    Member me(directory, rank, 2);
    std::vector<RegisteredRange> ranges;
    for (int i = 0; i < 3; ++i) ranges.push_back(me.offer(me.allocate(2 * kMegabyte), 2 * kMegabyte)());
    const Pretended before = pretended();
    const auto all = [&] { return ranges; };
    const auto place = [&] { return &me.windows; };
    const auto ids = me.registration.add_all(all, place);
    if (ids != std::vector<uint32_t>({1, 2, 3})) return "ids";
    me.registration.remove_all(&ids, &me.windows, [] { return true; });
    if (!(pretended() == before)) return "something is left";
    try {
      me.registration.add_all(
          [&] {
            auto fewer = ranges;
            if (rank == 1) fewer.pop_back();
            return fewer;
          },
          place);
      return "two are three";
    } catch (const Error& error) {
      if (!contains(error.what(), "rank 0 gave 3 segments, rank 1 gave 2 segments")) return error.what();
    }
    ranges[2].bytes -= rank;  // the last range differs
    try {
      me.registration.add_all(all, place);
      return "sizes do not matter";
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::mismatch || me.windows.size() != 0) return error.what();
    }
    try {
      me.registration.remove_all(rank == 0 ? nullptr : &ids, &me.windows, [] { return true; });
      return "removed";
    } catch (const Error& error) {
      if (!contains(error.what(), "not registered")) return error.what();
    }
    return pretended() == before ? "all or none" : "something is left at last";
  });
  expect_all(ranks.wait(), "all or none");
}

TEST(Registration, KeepsWhatTheDeviceMayStillUse) {
  TemporaryDirectory directory;
  Ranks ranks(2, [&](int rank) -> std::string {
    Member me(directory, rank, 2);
    char* const own = me.allocate(2 * kMegabyte);
    const Pretended before = pretended();
    me.add(own, 64);
    me.quiet = false;
    me.remove(own, 64);
    if (me.windows.find(own, 1)) return "found";
    if (pretended().mappings != before.mappings + 1) return "unmapped while the device may write";
    me.windows.clear();
    return pretended() == before ? "kept" : "something is left";
  });
  expect_all(ranks.wait(), "kept");
}

TEST(Registration, WithoutAPlaceDoesNothing) {
  TemporaryDirectory directory;
  Ranks ranks(2, [&](int rank) -> std::string {
    Member me(directory, rank, 2);
    char* const own = me.allocate(2 * kMegabyte);
    const Pretended before = pretended();
    if (me.registration.add(me.offer(own, 64), [] { return nullptr; }) != 0) return "an id";
    return pretended() == before ? "nothing" : "something is left";
  });
  expect_all(ranks.wait(), "nothing");
}

}  // namespace
}  // namespace ark::test
