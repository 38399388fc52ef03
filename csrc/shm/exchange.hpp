// Every pair of ranks opens a local socket and exchanges segment descriptors over it, in one polling thread.
//
// The higher rank of a pair calls, the lower one listens. Any local process may connect, so a connection counts only
// once its user, size, nonce and ranks are right; foreign, malformed or slow ones are dropped. A rank sends its
// descriptor only to its own user's processes: the caller checks the listener before it speaks, the listener checks the
// nonce.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "shm/bootstrap.hpp"
#include "shm/handle.hpp"
#include "util/local_socket.hpp"

namespace ark {

// A pair fails ("apart") if the system forbids the connection or the mapping. A peer is lost if its socket refuses
// connections although it is in the same network namespace and has published no outcome. Lower ranks detect a caller's
// death by knocking: they open a connection and close it at once, which the other side drops like any foreign one.
struct ExchangeOptions {
  int rank = 0;
  std::vector<HandleRecord> records;  // of all ranks, all willing
  std::chrono::steady_clock::time_point deadline;
  std::function<void()> check;  // called between waits; throws what ends the exchange
  // Called as soon as a pair has failed. `why` is empty if the peer failed, because its own outcome says more.
  std::function<void(int peer, const std::string& why)> on_apart;
  std::function<bool(int peer)> has_spoken;  // the peer has published an outcome, so it lives
};

struct ExchangeResult {
  Neighbourhood neighbourhood;  // complete only if nothing below is set
  int lost = -1;                // this peer ended
  bool apart = false;           // on_apart has reported why
  std::vector<int> silent;      // ranks that had not answered at the deadline
};

// Takes ownership of this rank's segment and listener.
ExchangeResult exchange(const ExchangeOptions& options, SharedMemory own, UniqueFd listener);

}  // namespace ark
