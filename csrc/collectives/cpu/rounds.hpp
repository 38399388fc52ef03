// Rounds: the protocol that every shared-memory collective uses.
//
// Each rank has an outbox, a channel that all peers read. In a round a rank publishes at most one slot and reads those
// peers' slots that it needs. An operation takes the same number of rounds on every rank, so rounds are numbered over
// the group's life and nothing is reset. The first slot of an operation begins with the writer's Descriptor. Readers
// compare it with theirs, so ranks that disagree fail before a wrong byte reaches a tensor.
#pragma once

#include <functional>
#include <vector>

#include "collectives/cpu/channel.hpp"
#include "collectives/operation.hpp"

namespace ark {

struct SlotHeader {
  Descriptor descriptor;
  double factor;
  uint64_t reserved[3];
};
static_assert(sizeof(SlotHeader) == 64);

// published  rounds this rank has published (its outbox's counter)
// released   rounds of which this rank will read no more slots (one counter for all outboxes)
// A slot is overwritten `slots` rounds later, once all ranks have released its round. The channel orders memory.
class Rounds {
 public:
  // outboxes[r]: rank r's channel, which all other ranks read; `released`: this rank's counter. commit(bytes) commits
  // memory for the first `bytes` of each own slot, or throws.
  Rounds(int rank, std::vector<Channel> outboxes, protocol::Counter* released, Waiter waiter, bool debug,
         std::function<void(size_t)> commit);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(outboxes_.size()); }
  size_t capacity() const { return capacity_; }  // payload per slot, in bytes
  Waiter& waiter() { return waiter_; }
  int name(int rank) { return waiter_.health().name(rank); }  // rank name for messages

  // Starts an operation whose slots carry at most `payload` bytes. next() is its first round.
  void begin(const Operation& operation, size_t payload);
  uint64_t next() const { return next_; }

  // Waits until this rank's slot of round n may be overwritten. Rounds are opened and published in order.
  std::byte* open(uint64_t round);
  void publish(uint64_t round);
  // Publishes a round without content.
  void pass(uint64_t round);

  // Waits for the peer's slot of round n. The first round of an operation is checked.
  const std::byte* read(uint64_t round, int peer);
  double factor_of(uint64_t round, int peer) const;
  // This rank will read nothing more of round n or earlier.
  void release(uint64_t round);

  // In debug mode, waits for every rank's first round and compares it, even if this operation does not read it.
  void check_all(uint64_t first_round);
  // Fails the group with this error and throws it.
  [[noreturn]] void fail(const Error& error);

 private:
  void check_descriptor(const SlotHeader& header, int peer);

  int rank_;
  std::vector<Channel> outboxes_;
  protocol::Counter* released_;
  Waiter waiter_;
  bool debug_;
  std::function<void(size_t)> commit_;
  size_t committed_ = 0;  // committed bytes of each own slot
  size_t capacity_;
  uint64_t next_ = 0;   // rounds published or passed
  uint64_t first_ = 0;  // first round of the current operation
  Operation operation_;
};

}  // namespace ark
