// connect() between real processes: every group size, every way to be apart, and what earlier starts leave behind.
#include "memory/bootstrap.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "memory/identity.hpp"
#include "../support/processes.hpp"

namespace ark {
namespace {

using test::DirectoryStore;
using test::Ranks;
using test::TemporaryDirectory;
using std::chrono::milliseconds;

ConnectOptions options_for(int rank, int size, milliseconds timeout = milliseconds(20000)) {
  ConnectOptions options;
  options.rank = rank;
  options.size = size;
  options.segment_bytes = 4096 * static_cast<size_t>(rank + 1) + 1;
  options.timeout = timeout;
  return options;
}

// Writes to every segment, waits for everyone, and reads what the others wrote into its own.
std::string talk(int rank, int size, Neighbourhood& all, DirectoryStore& store) {
  for (int peer = 0; peer < size; ++peer) {
    if (all.segments[peer].size() != 4096 * static_cast<size_t>(peer + 1) + 1) return "wrong segment";
    all.segments[peer].data()[rank] = std::byte(rank + 1);
    const bool connected = all.connections[peer].get() >= 0;
    if (connected != (peer != rank)) return "wrong connections";
    if (all.pids[peer] <= 0 || (peer == rank) != (all.pids[peer] == ::getpid())) return "wrong pids";
  }
  store.set("written/" + std::to_string(rank), {1});
  for (int peer = 0; peer < size; ++peer) store.get("written/" + std::to_string(peer), milliseconds(20000));
  for (int peer = 0; peer < size; ++peer)
    if (all.segments[rank].data()[peer] != std::byte(peer + 1)) return "rank " + std::to_string(peer) + " is not heard";
  return "shared";
}

std::string outcome_of(const ConnectResult& result) {
  return result.neighbourhood ? "shared" : "apart: " + result.reason;
}

class GroupSize : public testing::TestWithParam<int> {};

TEST_P(GroupSize, EveryRankMapsEverySegment) {
  TemporaryDirectory directory;
  Ranks ranks(GetParam(), [&](int rank) {
    DirectoryStore store(directory.path());
    ConnectResult result = connect(store, options_for(rank, GetParam()));
    return result.neighbourhood ? talk(rank, GetParam(), *result.neighbourhood, store) : result.reason;
  });
  for (const auto& result : ranks.wait()) EXPECT_EQ(result.text, "shared");
}

INSTANTIATE_TEST_SUITE_P(OneToEight, GroupSize, testing::Range(1, 9));

}  // namespace
}  // namespace ark
