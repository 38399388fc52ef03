// Every pair of ranks opens one local socket and trades the descriptors of their segments over it.
//
// The higher rank of a pair calls, the lower one listens. All of it runs in one thread that polls: the listener, calls
// that wait for an answer, and connections whose hello is not complete yet. Anyone on the machine may connect, so a
// connection counts for nothing until its user, size, nonce and ranks are right; whatever is foreign, malformed,
// oversized or slow is dropped and the pairs go on. A rank sends its descriptor only to a process of the same user:
// the caller checks who listens before it speaks, the listener has seen the nonce before it answers.
//
// A pair fails ("apart") when the system forbids the connection or the mapping. A peer is lost when its socket refuses
// although it lives in the same network namespace and it has published no outcome. Ranks below learn of a caller's
// death by knocking: a connection that is closed at once, which the other side drops like any foreign one.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "shm/bootstrap.hpp"
#include "shm/handle.hpp"
#include "util/local_socket.hpp"

namespace ark {

struct ExchangeOptions {
  int rank = 0;
  std::vector<HandleRecord> records;  // of all ranks, all willing
  std::chrono::steady_clock::time_point deadline;
  std::function<void()> check;  // between waits; throws what ends the exchange
  // As soon as a pair has failed. `why` is empty when it was the peer that failed: its own outcome says more.
  std::function<void(int peer, const std::string& why)> on_apart;
  std::function<bool(int peer)> has_spoken;  // the peer has published an outcome: it lives
};

struct ExchangeResult {
  Neighbourhood neighbourhood;  // complete only when nothing below is set
  int lost = -1;                // this peer ended
  bool apart = false;           // on_apart has said why
  std::vector<int> silent;      // at the deadline, these had not answered
};

// Takes this rank's segment and listener; both live as long as the result, or end here.
ExchangeResult exchange(const ExchangeOptions& options, SharedMemory own, UniqueFd listener);

}  // namespace ark
