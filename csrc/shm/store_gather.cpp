// Polls the store with growing pauses. Rank 0 waits for all values and publishes them joined; the other ranks wait for
// that one key. The error of a timeout names the ranks whose values are missing.
#include "shm/store_gather.hpp"

#include <algorithm>
#include <thread>

#include "shm/rendezvous.hpp"
#include "util/error.hpp"

namespace ark {

namespace {

using Clock = std::chrono::steady_clock;
using Values = std::vector<std::vector<uint8_t>>;
using std::chrono::milliseconds;

constexpr milliseconds kSlowestPoll{20};

[[noreturn]] void raise_missing(KeyValueStore& store, const std::vector<std::string>& keys, int rank,
                                milliseconds timeout) {
  std::vector<int> missing;
  for (size_t r = 0; r < keys.size(); ++r)
    if (!store.find(keys[r])) missing.push_back(static_cast<int>(r));
  if (missing.empty()) missing.push_back(0);  // all ranks are there, so rank 0 has not joined the values
  throw Error(
      ErrorKind::timeout,
      name_ranks(missing) + " did not say what the others wait for within " + std::to_string(timeout.count()) + " ms",
      ErrorContext{rank, missing.size() == 1 ? missing[0] : -1, "init", 0,
                   "Look at that rank's output; raise the timeout if it starts slowly."});
}

// Encodes each value as four bytes of length and its data.
std::vector<uint8_t> joined(const Values& values) {
  std::vector<uint8_t> all;
  for (const auto& value : values) {
    const auto length = static_cast<uint32_t>(value.size());
    for (int i = 0; i < 4; ++i) all.push_back(static_cast<uint8_t>(length >> (8 * i)));
    all.insert(all.end(), value.begin(), value.end());
  }
  return all;
}

Values split(const std::vector<uint8_t>& all, int rank, int size) {
  Values values;
  size_t at = 0;
  for (int r = 0; r < size; ++r) {
    size_t length = SIZE_MAX;
    if (all.size() - at >= 4) {
      length = 0;
      for (int i = 0; i < 4; ++i) length |= size_t{all[at++]} << (8 * i);
    }
    if (length > all.size() - at) break;
    values.emplace_back(all.begin() + static_cast<ptrdiff_t>(at), all.begin() + static_cast<ptrdiff_t>(at + length));
    at += length;
  }
  if (static_cast<int>(values.size()) == size && at == all.size()) return values;
  throw Error(ErrorKind::mismatch, "what rank 0 put together in the rendezvous store is not of this group",
              ErrorContext{rank, 0, "init", 0,
                           "Run the same version of ark_torch on all ranks, and let nothing else write to the store."});
}

}  // namespace

std::vector<std::vector<uint8_t>> store_all_gather(KeyValueStore& store, const std::string& prefix, int rank, int size,
                                                   const std::vector<uint8_t>& own, milliseconds timeout) {
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(prefix + "/" + std::to_string(r));
  const std::string together = prefix + "/all";
  store.set(keys[rank], own);
  const auto until = Clock::now() + timeout;
  for (milliseconds pause{1};; pause = std::min(pause * 2, kSlowestPoll)) {
    if (rank != 0) {
      if (const auto found = store.find(together)) return split(*found, rank, size);
    } else if (auto values = store.find_all(keys)) {
      store.set(together, joined(*values));
      return std::move(*values);
    }
    if (Clock::now() >= until) raise_missing(store, keys, rank, timeout);
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace ark
