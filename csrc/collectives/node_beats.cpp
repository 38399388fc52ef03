// Writes and reads the heartbeats of node_beats.hpp. A rendezvous store may block forever. So a thread of its own
// writes the beats, each query runs on another one, and both are abandoned when the store does not answer in time.
#include "collectives/node_beats.hpp"

#include <algorithm>
#include <condition_variable>
#include <mutex>

#include "shm/rendezvous.hpp"
#include "util/error.hpp"
#include "util/start_thread.hpp"

namespace ark {

namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = NodeBeats::Milliseconds;

constexpr size_t kBeatBytes = 8;

std::vector<uint8_t> beat_bytes(uint64_t value) {
  std::vector<uint8_t> bytes(kBeatBytes);
  for (size_t i = 0; i < kBeatBytes; ++i) bytes[i] = static_cast<uint8_t>(value >> (8 * i));
  return bytes;
}

uint64_t beat_of(const std::vector<uint8_t>& bytes) {
  if (bytes.size() != kBeatBytes)
    throw Error(ErrorKind::mismatch, "a beat has " + std::to_string(bytes.size()) + " bytes, not of this ark_torch");
  uint64_t value = 0;
  for (size_t i = 0; i < kBeatBytes; ++i) value |= uint64_t{bytes[i]} << (8 * i);
  return value;
}

uint64_t age_of(Clock::time_point born) {
  return static_cast<uint64_t>(std::chrono::duration_cast<Milliseconds>(Clock::now() - born).count());
}

std::string in_seconds(uint64_t milliseconds) {
  return std::to_string(std::max<uint64_t>(1, (milliseconds + 500) / 1000)) + " s";
}

}  // namespace

// State that the writing thread shares with this object, which may be destroyed first.
struct NodeBeats::Beating {
  std::mutex mutex;
  std::condition_variable changed;
  bool stop = false, ended = false;
};

Milliseconds NodeBeats::period_of(Milliseconds timeout) {
  return std::clamp<Milliseconds>(timeout / 16, Milliseconds(250), Milliseconds(5000));
}

NodeBeats::NodeBeats(std::shared_ptr<KeyValueStore> store, std::string prefix, NodePlan plan, Milliseconds period)
    : store_(std::move(store)), prefix_(std::move(prefix)), plan_(std::move(plan)), period_(period) {
  if (plan_.local() != 0) return;
  beating_ = std::make_shared<Beating>();
  const auto beat = [store = store_, own = key(plan_.node()), born = born_, period, beating = beating_] {
    std::unique_lock lock(beating->mutex);
    while (!beating->stop) {
      lock.unlock();
      bool written = true;
      try {
        store->set(own, beat_bytes(age_of(born)));
      } catch (const std::exception&) {  // a lost store fails no group; a rank that misses a node sees it when it reads
        written = false;
      }
      lock.lock();
      if (!written) break;
      beating->changed.wait_for(lock, period, [&] { return beating->stop; });
    }
    beating->ended = true;
    beating->changed.notify_all();
  };
  thread_ = start_thread("the thread that tells other nodes that this one lives", beat);
}

NodeBeats::~NodeBeats() {
  close();
}

void NodeBeats::close() {
  if (!thread_.joinable()) return;
  std::unique_lock lock(beating_->mutex);
  beating_->stop = true;
  beating_->changed.notify_all();
  const bool ended = beating_->changed.wait_for(lock, kForTheStore, [this] { return beating_->ended; });
  lock.unlock();
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();  // it is stuck in a store that does not answer
  }
}

NodeBeats::Reading NodeBeats::read() const {
  struct Answer {
    std::mutex mutex;
    std::condition_variable changed;
    bool come = false;
    Reading reading;
  };
  std::vector<std::string> keys;
  for (int node = 0; node < plan_.nodes(); ++node) keys.push_back(key(node));
  const auto answer = std::make_shared<Answer>();
  const auto ask = [answer, store = store_, keys = std::move(keys)] {
    Reading reading;
    try {
      if (const auto found = store->find_all(keys)) {  // one round trip
        for (const auto& one : *found) reading.lived.emplace_back(beat_of(one));
      } else {
        for (const std::string& one : keys) {
          const auto value = store->find(one);
          reading.lived.push_back(value ? std::optional(beat_of(*value)) : std::nullopt);
        }
      }
    } catch (const Error& error) {
      reading.trouble = error.message();
    } catch (const std::exception& error) {
      reading.trouble = error.what();
    }
    const std::lock_guard lock(answer->mutex);
    answer->reading = std::move(reading);
    answer->come = true;
    answer->changed.notify_all();
  };
  try {
    start_thread("the thread that asks the store for other nodes", ask).detach();
  } catch (const Error& error) {
    return {{}, error.message()};
  }
  std::unique_lock lock(answer->mutex);
  if (answer->changed.wait_for(lock, kForTheStore, [&] { return answer->come; })) return answer->reading;
  return {{}, "no answer in " + std::to_string(kForTheStore.count()) + " ms"};
}

std::string NodeBeats::node_text(int rank) const {
  const int node = plan_.node_of(rank);
  return "node " + std::to_string(node) + " (" + name_ranks(plan_.members(node)) + ")";
}

std::string NodeBeats::silence(int rank, const Reading& before, const Reading& after) const {
  const std::string who = node_text(rank);
  if (const std::string& trouble = before.trouble.empty() ? after.trouble : before.trouble; !trouble.empty()) {
    if (plan_.node_of(rank) == plan_.node_of(0))
      return who + " is silent, and so is the rendezvous store, which is on rank 0's node as a rule (" + trouble + ")";
    return who + " is silent, and the rendezvous store cannot tell whether it lives (" + trouble + ")";
  }
  std::string told = silence_of_node(plan_.node_of(rank), before, after);
  for (int node = 0; told.empty() && node < plan_.nodes(); ++node)
    if (node != plan_.node()) told = silence_of_node(node, before, after);
  return told;
}

std::string NodeBeats::silence_of_node(int node, const Reading& before, const Reading& after) const {
  if (before.lived[node] != after.lived[node]) return "";
  // Both began with the group.
  const auto watched = static_cast<uint64_t>(watch().count());
  const uint64_t age = age_of(born_), lived = after.lived[node].value_or(0);
  const uint64_t silent = age > lived ? std::max(watched, age - lived) : watched;
  return node_text(plan_.members(node)[0]) + " has not been heard of for " + in_seconds(silent) +
         ": its machine is down, stopped or cut off, or its processes are";
}

}  // namespace ark
