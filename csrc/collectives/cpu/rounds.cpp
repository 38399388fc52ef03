// Opens, publishes and reads a round's slots. The first slot of an operation carries this rank's descriptor, and every
// reader checks it. Pages of the outbox are committed on demand, so that small messages take little memory.
#include "collectives/cpu/rounds.hpp"

#include <algorithm>
#include <bit>

#include "collectives/agreement.hpp"

namespace ark {

Rounds::Rounds(int rank, std::vector<Channel> outboxes, protocol::Counter* released, Waiter waiter, bool debug,
               std::function<void(size_t)> commit)
    : rank_(rank),
      outboxes_(std::move(outboxes)),
      released_(released),
      waiter_(std::move(waiter)),
      debug_(debug),
      commit_(std::move(commit)),
      capacity_(outboxes_[rank].slot_bytes() - sizeof(SlotHeader)) {}

void Rounds::begin(const Operation& operation, size_t payload) {
  operation_ = operation;
  first_ = next_;
  waiter_.set_operation(operation.context);
  waiter_.health().check_alive(operation.context);
  const size_t bytes = payload + sizeof(SlotHeader);
  if (bytes > committed_) {
    // Powers of two, so that growing sizes commit memory only a few times.
    const size_t goal = std::min(capacity_ + sizeof(SlotHeader), std::max<size_t>(4096, std::bit_ceil(bytes)));
    commit_(goal);
    committed_ = goal;
  }
}

std::byte* Rounds::open(uint64_t round) {
  std::byte* slot = outboxes_[rank_].open(round, waiter_);
  if (round == first_) {
    auto* header = reinterpret_cast<SlotHeader*>(slot);
    header->descriptor = operation_.descriptor;
    header->factor = operation_.factor;
  }
  return slot + sizeof(SlotHeader);
}

void Rounds::publish(uint64_t round) {
  outboxes_[rank_].signal(round);
  next_ = round + 1;
}

void Rounds::pass(uint64_t round) {
  // The first header still carries this rank's descriptor; later rounds carry nothing.
  if (round == first_) open(round);
  publish(round);
}

const std::byte* Rounds::read(uint64_t round, int peer) {
  const std::byte* slot = outboxes_[peer].wait(round, waiter_);
  if (round == first_) check_descriptor(*reinterpret_cast<const SlotHeader*>(slot), peer);
  return slot + sizeof(SlotHeader);
}

double Rounds::factor_of(uint64_t round, int peer) const {
  return reinterpret_cast<const SlotHeader*>(outboxes_[peer].slot(round))->factor;
}

void Rounds::release(uint64_t round) {
  advance_and_wake(*released_, round + 1);
}

void Rounds::check_all(uint64_t first_round) {
  if (!debug_) return;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank_) read(first_round, peer);
  }
}

void Rounds::check_descriptor(const SlotHeader& header, int peer) {
  const Descriptor theirs = header.descriptor;  // a copy, because the peer's memory may change
  if (const auto error = disagreement(operation_, theirs, name(rank_), name(peer))) fail(*error);
}

void Rounds::fail(const Error& error) {
  waiter_.health().fail(error);
  throw error;
}

}  // namespace ark
