// Rounds: the discipline that every shared-memory collective is written in.
//
// Each rank owns an outbox, a channel that all its peers read. In a round a rank may publish at most one slot and
// read those of the peers it cares about. Every operation takes the same number of rounds on every rank, computed
// from what all ranks know, so rounds are numbered through the life of the group and nothing is ever reset.
//   published  rounds this rank has published (its outbox's counter)
//   released   rounds of which this rank will read no peer's slot any more (one counter for all outboxes)
// A slot is overwritten once all ranks have released its round, `slots` rounds later; ordering is the channel's.
//
// The first slot of an operation begins with the writer's Descriptor; whoever reads it compares it with its own, so
// ranks that disagree find out before a wrong byte reaches a user's tensor.
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

class Rounds {
 public:
  // outboxes[r]: rank r's channel, its readers all other ranks; `released`: this rank's counter. `commit(bytes)` makes
  // the first `bytes` of each own slot real memory, or throws.
  Rounds(int rank, std::vector<Channel> outboxes, protocol::Counter* released, Waiter waiter, bool debug,
         std::function<void(size_t)> commit);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(outboxes_.size()); }
  size_t capacity() const { return capacity_; }  // bytes of payload a slot
  Waiter& waiter() { return waiter_; }
  int name(int rank) { return waiter_.health().name(rank); }  // for messages

  // Starts an operation whose slots carry at most `payload` bytes; its first round's number is next().
  void begin(const Operation& operation, size_t payload);
  uint64_t next() const { return next_; }

  // This rank's slot of round n, once it may be overwritten. Rounds are opened and published in order.
  std::byte* open(uint64_t round);
  void publish(uint64_t round);
  // Publishes a round in which this rank has nothing to say.
  void pass(uint64_t round);

  // Peer's slot of round n, once published. The first round of an operation is checked.
  const std::byte* read(uint64_t round, int peer);
  double factor_of(uint64_t round, int peer) const;
  // This rank will read nothing of round n or before.
  void release(uint64_t round);

  // Debug mode: waits for every rank's first round and compares, whether this operation reads it or not.
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
  size_t committed_ = 0;  // bytes of each own slot that are real memory
  size_t capacity_;
  uint64_t next_ = 0;   // rounds published or passed
  uint64_t first_ = 0;  // first round of the operation in progress
  Operation operation_;
};

}  // namespace ark
