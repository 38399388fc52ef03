// Whether another node is still there, told by the rendezvous store: for when all of a node's ranks are gone at once,
// or cut off, so that none of them can tell.
//
// One rank a node, its first, writes every period how long it has lived. Nobody reads that until a wait for another
// node's rank is over its time: then who waited reads every node's, watches for some periods, and reads again. A value
// that has not changed is silence. All nodes are looked at, since the rank waited for may itself wait for one that is
// gone. So a healthy group costs the store one write a node in a period, and no reads.
//
// Clocks of machines are never compared: only equality counts, and the difference of ages is for people. A store whose
// host is stopped answers never, so each reading is on a thread of its own, and neither it nor the writing thread is
// waited for longer than the store's bound; both hold what they use.
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

class NodeBeats {
 public:
  using Milliseconds = std::chrono::milliseconds;
  static constexpr Milliseconds kForTheStore{2000};  // to answer, or to take a beat before this object goes
  static constexpr int kWatched = 4;                 // periods without a beat

  // Of a group's timeout: short for short ones, so that watching adds little to them.
  static Milliseconds period_of(Milliseconds timeout);

  // store: it may be used, by threads, after this object has gone. prefix: keys of this start of the group alone.
  NodeBeats(std::shared_ptr<KeyValueStore> store, std::string prefix, NodePlan plan, Milliseconds period);
  ~NodeBeats();
  void close();  // no more beats; idempotent

  Milliseconds watch() const { return period_ * kWatched; }
  // The longest that two readings take, with the time between.
  Milliseconds patience() const { return watch() + 2 * kForTheStore; }

  struct Reading {
    // By node: milliseconds, by its own clock; empty: it never wrote.
    std::vector<std::optional<uint64_t>> lived;
    std::string trouble;  // why the store told nothing; empty: it answered
  };
  Reading read() const;

  // For people, from what was read before and after watch(), where this rank waits for `rank`: of that one's node, or
  // else of any other that is silent; empty: they live.
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
  std::shared_ptr<Beating> beating_;  // where this rank writes
  std::thread thread_;
};

}  // namespace ark
