// Detects through the rendezvous store that another node is gone: for when all its ranks die or are cut off at once, so
// that none can report it.
//
// The first rank of each node periodically writes the age of the node. Ranks read these beats only when a wait for
// another node times out: they read all nodes, wait some periods and read again. An unchanged value means silence. All
// nodes are checked, because the awaited rank may itself wait for one that is gone. So a healthy group costs the store
// one write per node and period, and no reads.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "collectives/node_plan.hpp"
#include "shm/key_value.hpp"

namespace ark {

// Clocks of machines are never compared: only equality counts, and age differences are for people. A store on a stopped
// host never answers. So each reading runs on its own thread, and waits for it and for the writing thread are bounded
// by kForTheStore. Both threads own what they use.
class NodeBeats {
 public:
  using Milliseconds = std::chrono::milliseconds;
  static constexpr Milliseconds kForTheStore{2000};  // for an answer, or for a last beat at destruction
  static constexpr int kWatched = 4;                 // periods without a beat

  // Derived from the group's timeout: short timeouts get short periods, so that watching adds little.
  static Milliseconds period_of(Milliseconds timeout);

  // store: threads may use it after this object is destroyed. prefix: of keys for this start of the group only.
  NodeBeats(std::shared_ptr<KeyValueStore> store, std::string prefix, NodePlan plan, Milliseconds period);
  ~NodeBeats();
  void close();  // stops the beats; idempotent

  Milliseconds watch() const { return period_ * kWatched; }
  // The longest that two readings and the time between them take.
  Milliseconds patience() const { return watch() + 2 * kForTheStore; }

  struct Reading {
    // By node: age in milliseconds by its own clock; empty: it never wrote.
    std::vector<std::optional<uint64_t>> lived;
    std::string trouble;  // why the store did not answer; empty if it did
  };
  Reading read() const;

  // For people: compares readings before and after watch() while this rank waits for `rank`. Describes that rank's node
  // if it is silent, else any other silent node. Empty if all live.
  std::string silence(int rank, const Reading& before, const Reading& after) const;
  std::string node_text(int rank) const;  // "node 1 (ranks 2 and 3)"

 private:
  struct Beating;
  std::string key(int node) const { return prefix_ + "/" + std::to_string(node); }
  std::string silence_of_node(int node, const Reading& before, const Reading& after) const;

  const std::shared_ptr<KeyValueStore> store_;
  const std::string prefix_;
  const NodePlan plan_;
  const Milliseconds period_;
  const std::chrono::steady_clock::time_point born_ = std::chrono::steady_clock::now();
  std::shared_ptr<Beating> beating_;  // null if this rank does not write
  std::thread thread_;
};

}  // namespace ark
