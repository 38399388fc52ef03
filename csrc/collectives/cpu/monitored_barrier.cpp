// A barrier that names missing ranks: every rank advances its counter, and rank 0 checks all of them, then releases the
// ranks.
//
// It takes no rounds, so it works while a collective hangs, and its timeout does not fail the group. Counters only
// grow, so a rank that gave up is not mistaken for one that arrived at the next barrier. Memory ordering is that of
// every counter (collectives/cpu/wait.hpp); it publishes nothing else.
#include "collectives/cpu/algorithms.hpp"
#include "collectives/cpu/wait.hpp"
#include "health/group_health.hpp"
#include "util/error.hpp"

namespace ark {

void monitored_barrier(GroupHealth& health, uint64_t number, const OperationContext& context, bool wait_all) {
  const int rank = health.rank();
  advance_and_wake(health.own().barrier_arrived, number);
  auto wait_for = [&](protocol::Counter& counter, int peer) {
    constexpr auto kSlice = std::chrono::milliseconds(20);
    for (;;) {
      const uint64_t seen = protocol::current(counter);
      if (seen >= number) return true;
      if (const auto alarm = health.alarm(context, peer)) {
        if (protocol::reached(counter, number)) return true;
        if (alarm->kind == GroupHealth::Alarm::late) return false;
        health.raise(*alarm, context, peer);
      }
      sleep_on(counter, seen, kSlice);
    }
  };
  // Gloo's wording, which programs look for, as do PyTorch's own tests from 2.15 on.
  auto give_up = [&](const std::vector<int>& missing) {
    std::string names;
    for (int peer : missing) names += (names.empty() ? "" : ", ") + std::to_string(peer);
    const std::string span = " in " + std::to_string(context.timeout.count()) + " ms";
    const std::string what =
        rank == 0 ? (missing.size() > 1 ? "Ranks " : "Rank ") + names + " failed to pass monitoredBarrier" + span +
                        ", and Rank 0 timed out in monitoredBarrier"
                  : "Rank " + std::to_string(rank) +
                        " successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
                        "rank 0: it has not passed" +
                        span;
    throw Error(ErrorKind::timeout, what,
                ErrorContext{rank, missing.front(), context.name, context.sequence,
                             "Look at what these ranks are doing, or allow them more time."});
  };
  if (rank != 0) {
    if (!wait_for(health.of(0).barrier_passed, 0)) give_up({0});
    return;
  }
  std::vector<int> missing;
  for (int peer = 1; peer < health.size(); ++peer) {
    if (wait_for(health.of(peer).barrier_arrived, peer)) continue;
    missing.push_back(peer);
    if (!wait_all) break;
  }
  if (!missing.empty()) give_up(missing);
  advance_and_wake(health.own().barrier_passed, number);
}

}  // namespace ark
