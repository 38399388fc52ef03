// How the ranks of a group find out whether they can share memory, and map each other's segments if so.
//
// connect() is collective: every rank of the group calls it once, with a store that all of them reach. Whether memory
// is shared is found out, not configured, and every rank comes to the same decision:
//   1. agree on a nonce of this start (rendezvous.hpp; what an earlier start left in the store does no harm),
//   2. publish a record each, read everyone's: other machine, other network namespace, other user, or a rank that
//      declines means "not shared" for all,
//   3. every pair opens a local socket and trades segment descriptors over it (exchange.hpp),
//   4. publish the outcome of 3, read everyone's: one failed pair means "not shared" for all.
// A peer that dies meanwhile raises Error(peer_lost) naming it; one that never comes Error(timeout) naming it.
//
// Sockets are *abstract* Unix sockets with a random 128-bit name: they exist only as long as a process holds them, so
// even SIGKILL at any moment leaves nothing on disk, TMPDIR may be full, read-only or too long, and no other user can
// occupy the name beforehand. They have no file permissions; instead both ends demand the same user (SO_PEERCRED) and
// compare the nonce, and nobody is sent a descriptor before both checks passed. Their scope is the network
// namespace: containers which share none are "not shared", which is what such isolation asks for.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "shm/key_value.hpp"
#include "shm/shared_memory.hpp"
#include "util/unique_fd.hpp"

namespace ark {

struct Neighbourhood {
  std::vector<SharedMemory> segments;  // [size], by rank, own included
  std::vector<UniqueFd> connections;   // [size], own empty: stream sockets, open as long as the peer lives
  std::vector<int> pids;               // [size], as seen from this process; for messages
};

struct ConnectOptions {
  int rank = 0;
  int size = 1;
  size_t segment_bytes = 0;  // of this rank's own segment; ranks may differ
  std::chrono::milliseconds timeout{0};
  bool allow_sharing = true;
  std::function<bool()> interrupted = {};  // asked several times a second; true: Error(aborted)
};

struct ConnectResult {
  std::optional<Neighbourhood> neighbourhood;
  std::string reason;  // why memory is not shared; empty when it is
  std::string start;   // this start of the group, in hexadecimal: equal on all ranks, never used before
  // Where memory is not shared: which ranks might share it among them (a machine's or container's, of one user). Rank
  // r's node, numbered as ranks come to them; a rank that declines is a node of its own.
  std::vector<int> nodes;
};

// Of a process that shares with nobody.
Neighbourhood neighbourhood_of_one(size_t segment_bytes);

// The store's keys must be this group's own (a prefix that no other living group uses).
ConnectResult connect(KeyValueStore& store, const ConnectOptions& options);

// The same with a given identity, as if this process ran elsewhere (tests of groups over several machines).
struct Identity;
ConnectResult connect(KeyValueStore& store, const ConnectOptions& options, const Identity& identity);

}  // namespace ark
