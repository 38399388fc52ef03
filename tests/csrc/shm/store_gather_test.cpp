// Tests gathering all ranks' values through a store: any size, late or missing ranks, and nonsense in the keys.
#include "shm/store_gather.hpp"

#include <gtest/gtest.h>

#include "shm/support.hpp"

namespace ark::test {
namespace {

std::string gathered(const TemporaryDirectory& directory, int rank, int size, milliseconds timeout) {
  DirectoryStore store(directory.path());
  try {
    const std::string own(static_cast<size_t>(rank * 100), static_cast<char>('a' + rank));  // empty for rank 0
    const auto values = store_all_gather(store, "words", rank, size, {own.begin(), own.end()}, timeout);
    if (static_cast<int>(values.size()) != size) return "of another size";
    for (int r = 0; r < size; ++r)
      if (values[r] != std::vector<uint8_t>(static_cast<size_t>(r * 100), static_cast<uint8_t>('a' + r)))
        return "wrong";
    return "right";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(StoreGather, EveryoneHasEverything) {
  for (int size : {1, 2, 7}) {
    TemporaryDirectory directory;
    Ranks ranks(size, [&](int rank) {
      if (rank == 1) std::this_thread::sleep_for(milliseconds(100));
      return gathered(directory, rank, size, milliseconds(20000));
    });
    for (const auto& result : ranks.wait()) EXPECT_EQ(result.text, "right");
  }
}

TEST(StoreGather, WhoIsMissingIsNamed) {
  for (int missing : {0, 2}) {
    TemporaryDirectory directory;
    Ranks ranks(4, [&](int rank) {
      return rank == missing ? std::string("away") : gathered(directory, rank, 4, milliseconds(300));
    });
    const auto& results = ranks.wait();
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == missing) continue;
      EXPECT_NE(results[rank].text.find("rank " + std::to_string(missing) + " did not say"), std::string::npos)
          << results[rank].text;
    }
  }
}

TEST(StoreGather, NonsenseIsRefused) {
  const std::vector<std::vector<uint8_t>> nonsense = {
      {}, {1, 2, 3}, {0, 0, 0, 0, 255, 255, 255, 255}, {0, 0, 0, 0, 0, 0, 0, 0, 7}, {9, 0, 0, 0, 1}};
  for (const auto& value : nonsense) {
    TemporaryDirectory directory;
    DirectoryStore store(directory.path());
    store.set("words/all", value);
    const std::string text = gathered(directory, 1, 2, milliseconds(1000));
    EXPECT_NE(text.find("what rank 0 put together"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace ark::test
