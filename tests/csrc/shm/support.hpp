// Test support: a rank that connects and proves that the shared memory works.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "shm/bootstrap.hpp"
#include "shm/handle.hpp"
#include "support/processes.hpp"
#include "util/identity.hpp"

namespace ark::test {

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != text.npos;
}

inline size_t segment_bytes_of(int rank) {
  return 4096 * static_cast<size_t>(rank + 1) + 1;
}

inline ConnectOptions options_for(int rank, int size, milliseconds timeout = milliseconds(20000)) {
  ConnectOptions options;
  options.rank = rank;
  options.size = size;
  options.segment_bytes = segment_bytes_of(rank);
  options.timeout = timeout;
  return options;
}

// Writes to every segment, waits for everyone, and reads what the others wrote into this rank's segment.
inline std::string talk(int rank, Neighbourhood& all, KeyValueStore& store, const std::string& key) {
  const int size = static_cast<int>(all.segments.size());
  for (int peer = 0; peer < size; ++peer) {
    if (all.segments[peer].size() != segment_bytes_of(peer)) return "wrong segment of rank " + std::to_string(peer);
    all.segments[peer].data()[rank] = std::byte(rank + 1);
    if ((all.connections[peer].get() >= 0) != (peer != rank)) return "wrong connections";
    if (all.pids[peer] <= 0 || (peer == rank) != (all.pids[peer] == ::getpid())) return "wrong process ids";
  }
  store.set(key + "/" + std::to_string(rank), {1});
  for (int peer = 0; peer < size; ++peer) store.get(key + "/" + std::to_string(peer), milliseconds(20000));
  for (int peer = 0; peer < size; ++peer)
    if (all.segments[rank].data()[peer] != std::byte(peer + 1)) return "rank " + std::to_string(peer) + " is not heard";
  return "shared";
}

// Returns "shared" or "apart: reason". Errors are left to the caller.
inline std::string connect_and_talk(KeyValueStore& store, const ConnectOptions& options, const Identity& identity,
                                    const std::string& key = "written") {
  ConnectResult result = connect(store, options, identity);
  if (!result.neighbourhood) return "apart: " + result.reason;
  return talk(options.rank, *result.neighbourhood, store, key);
}

inline std::string connect_and_talk(KeyValueStore& store, const ConnectOptions& options,
                                    const std::string& key = "written") {
  return connect_and_talk(store, options, Identity::of_this_process(), key);
}

// Returns the names of the sockets that the ranks of this store have published.
inline std::vector<std::string> published_sockets(const std::filesystem::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.path().filename().string().find("+record+") == std::string::npos) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    const std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    const std::string name = HandleRecord::decode(bytes).socket_name;
    if (!name.empty()) names.push_back("@" + name);
  }
  return names;
}

// Counts those that still exist in the kernel. By name, because other groups may be alive on this machine.
inline int count_living(const std::vector<std::string>& names) {
  std::ifstream table("/proc/net/unix");
  int count = 0;
  for (std::string line; std::getline(table, line);)
    for (const std::string& name : names) count += line.find(name) != std::string::npos;
  return count;
}

inline void expect_all(const std::vector<Result>& results, const std::string& text) {
  for (size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_EQ(results[rank].text, text) << "rank " << rank;
    EXPECT_FALSE(results[rank].killed_late) << "rank " << rank;
  }
}

}  // namespace ark::test
