// Finds out whether the ranks of a group can share memory, and maps their segments if so.
//
// connect() is collective: every rank calls it once with a common store. Whether memory is shared is detected, not
// configured, and every rank reaches the same decision. A peer that dies meanwhile raises Error(peer_lost), one that
// never arrives Error(timeout); both name the peer.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "shm/handle.hpp"
#include "shm/key_value.hpp"
#include "shm/shared_memory.hpp"
#include "util/unique_fd.hpp"

namespace ark {

struct Neighbourhood {
  std::vector<SharedMemory> segments;  // by rank, including this one
  std::vector<UniqueFd> connections;   // by rank, own empty; stream sockets that stay open while the peer lives
  std::vector<int> pids;               // by rank, as seen from this process; for messages
};

struct ConnectOptions {
  int rank = 0;
  int size = 1;
  size_t segment_bytes = 0;  // of this rank's segment; ranks may differ
  std::chrono::milliseconds timeout{0};
  bool allow_sharing = true;
  uint32_t release = this_release();       // all ranks must have the same
  std::function<bool()> interrupted = {};  // polled several times a second; true: throw Error(aborted)
};

struct ConnectResult {
  std::optional<Neighbourhood> neighbourhood;
  std::string reason;  // why memory is not shared; empty if it is
  std::string start;   // unique id of this start of the group in hexadecimal, equal on all ranks
  // If memory is not shared: the node of each rank, numbered in rank order. Ranks of a node (one machine or container,
  // one user) might share memory with each other. A rank that declines is its own node.
  std::vector<int> nodes;
};

// For a process that shares with no other.
Neighbourhood neighbourhood_of_one(size_t segment_bytes);

// The stages of connect():
//   1. Agree on a nonce of this start (rendezvous.hpp), so that leftovers of earlier starts do no harm.
//   2. Publish a record and read all records. A different machine, network namespace or user, or a rank that declines,
//      means "not shared" for all.
//   3. Every pair opens a local socket and exchanges segment descriptors over it (exchange.hpp).
//   4. Publish the outcome of 3 and read all outcomes. One failed pair means "not shared" for all.
// The store's keys must be unique to this group (a prefix that no other living group uses).
//
// Sockets are abstract Unix sockets with random 128-bit names. They exist only while a process holds them, so SIGKILL
// leaves nothing on disk, TMPDIR does not matter, and no other user can take the name first. They have no file
// permissions. Instead both ends require the same user (SO_PEERCRED) and compare the nonce before any descriptor is
// sent. Their scope is the network namespace: containers with separate ones are "not shared", as such isolation asks.
ConnectResult connect(KeyValueStore& store, const ConnectOptions& options);

// The same with a given identity, as if this process ran elsewhere (for tests of groups over several machines).
struct Identity;
ConnectResult connect(KeyValueStore& store, const ConnectOptions& options, const Identity& identity);

}  // namespace ark
