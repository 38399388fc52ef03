// Collectives over several nodes that only move bytes. Each byte goes once to every node that needs it, and spreads
// within the node through rounds of shared memory.
#include <algorithm>

#include "collectives/agreement.hpp"
#include "collectives/cpu/algorithms.hpp"
#include "process_group/carriers/carried_communicator.hpp"

namespace ark {

namespace {

void copy(void* to, const void* from, size_t bytes) {
  if (to != from) copy_bytes(to, from, bytes);
}

}  // namespace

std::vector<int> CarriedCommunicator::others_of(int root) const {
  if (rank_ != root) return plan_.node_of(root) == plan_.node() ? std::vector<int>{} : std::vector<int>{root};
  return plan_.foreign();
}

// A node's blocks fit into one first message, so this takes one round and one hop.
void CarriedCommunicator::gather_whole(Exchange& exchange, const void* in, void* const* outs, size_t bytes) {
  expect(plan_.peers());
  Rounds& rounds = node_->rounds();
  rounds.begin(exchange.operation, bytes);
  const uint64_t round = rounds.next();
  copy_bytes(rounds.open(round), in, bytes);
  rounds.publish(round);
  std::byte* blocks = scratch(rounds.size() * bytes);
  for (int i = 0; i < rounds.size(); ++i)
    copy_bytes(blocks + i * bytes, i == rounds.rank() ? in : rounds.read(round, i), bytes);
  rounds.release(round);
  for (const int peer : plan_.peers()) tell(exchange, peer, blocks, rounds.size() * bytes);
  hear_all(exchange, plan_.peers());
  for (int node = 0; node < plan_.nodes(); ++node) {
    const std::byte* from = node == plan_.node() ? blocks : heard_[plan_.stands_for(rank_, node)].data;
    for (const int rank : plan_.members(node)) copy_bytes(outs[rank], from, bytes), from += bytes;
  }
}

// Sends every block to one rank of each other node. Round k publishes piece k of a rank's own block and piece k -
// kPiecesAhead of the blocks that it received.
void CarriedCommunicator::gather_in_pieces(Exchange& exchange, const void* in, void* const* outs, size_t bytes) {
  using enum MessageChannel;
  const CarriedPath path = path_of(exchange, bytes);
  const size_t piece = path.piece, pieces = path.pieces, ahead = std::min(kPiecesAhead, pieces);
  const auto length = [&](size_t k) { return std::min(piece, bytes - k * piece); };
  meet(exchange, plan_.peers());
  const std::vector<int>& foreign = plan_.targets();  // ranks whose blocks this rank receives
  std::vector<size_t> receives(pieces * foreign.size());
  for (size_t k = 0; k < pieces; ++k) {
    for (size_t i = 0; i < foreign.size(); ++i) {
      receives[k * foreign.size() + i] =
          exchange.messages.receive(foreign[i], data, at_offset(outs[foreign[i]], k * piece), length(k));
    }
  }
  copy(outs[rank_], in, bytes);
  hear_all(exchange, plan_.peers());
  for (size_t k = 0; k < pieces; ++k) {
    for (const int node : plan_.others())
      exchange.messages.send(plan_.stands_for(rank_, node), data, at_offset(in, k * piece), length(k));
  }
  Rounds& rounds = node_->rounds();
  if (rounds.size() == 1) return;
  std::vector<std::vector<int>> held(rounds.size());  // for each rank of the node: the ranks whose blocks it publishes
  for (int i = 0; i < rounds.size(); ++i) held[i] = {plan_.own()[i]};
  for (int rank = 0; rank < size_; ++rank) {
    if (plan_.node_of(rank) != plan_.node()) held[plan_.local_of(plan_.stands_for(rank, plan_.node()))].push_back(rank);
  }
  rounds.begin(exchange.operation, piece * plan_.most_stood_for());
  const uint64_t first = rounds.next();
  const size_t steps = pieces + ahead;
  // The piece of the rank's i-th block that round t holds. It may lie beyond the last piece.
  const auto piece_of = [&](size_t t, size_t i) { return i == 0 ? t : t - ahead; };
  const auto publish = [&](size_t t) {
    for (size_t i = 0; i < foreign.size() && t >= ahead; ++i)
      exchange.messages.wait_for(receives[(t - ahead) * foreign.size() + i]);
    std::byte* slot = rounds.open(first + t);
    const std::vector<int>& own = held[rounds.rank()];
    for (size_t i = 0; i < own.size(); ++i) {
      const size_t k = piece_of(t, i);
      if (k < pieces) copy_bytes(slot + i * piece, at_offset(i == 0 ? in : outs[own[i]], k * piece), length(k));
    }
    rounds.publish(first + t);
  };
  const auto collect = [&](size_t t) {
    for (int other = 0; other < rounds.size(); ++other) {
      if (other == rounds.rank()) continue;
      const std::byte* slot = rounds.read(first + t, other);
      for (size_t i = 0; i < held[other].size(); ++i) {
        const size_t k = piece_of(t, i);
        if (k < pieces) copy_bytes(at_offset(outs[held[other][i]], k * piece), slot + i * piece, length(k));
      }
    }
    rounds.release(first + t);
  };
  for (size_t t = 0; t < steps; ++t) {
    publish(t);
    if (t > 0) collect(t - 1);
  }
  collect(steps - 1);
}

// Root sends to one rank of each other node. That rank, and root in its own node, publish the pieces to their node.
void CarriedCommunicator::broadcast_in_pieces(Exchange& exchange, void* data_, size_t bytes) {
  using enum MessageChannel;
  const int root = exchange.operation.descriptor.root;
  const std::vector<int> partners = partners_of(root);
  const int source = plan_.stands_for(root, plan_.node());  // the rank that publishes in this node
  const CarriedPath path = path_of(exchange, bytes);
  const bool in_first = path.way == CarriedWay::first;
  const size_t piece = path.piece, pieces = path.pieces;
  const auto length = [&](size_t k) { return std::min(piece, bytes - k * piece); };
  expect(partners);
  for (const int peer : partners)
    if (!in_first || rank_ == root) tell(exchange, peer, data_, in_first ? bytes : 0);
  std::vector<size_t> receives(pieces);
  if (rank_ != root && rank_ == source && !in_first)
    for (size_t k = 0; k < pieces; ++k)
      receives[k] = exchange.messages.receive(root, data, at_offset(data_, k * piece), length(k));
  const auto send = [&] {
    if (in_first) return;  // already sent, and root need not wait for the others
    hear_all(exchange, partners);
    for (size_t k = 0; k < pieces; ++k)
      for (const int peer : partners) exchange.messages.send(peer, data, at_offset(data_, k * piece), length(k));
  };
  if (rank_ != root) hear_all(exchange, partners);
  if (in_first && rank_ != root && rank_ == source) copy_bytes(data_, heard_[root].data, bytes);

  Rounds& rounds = node_->rounds();
  rounds.begin(exchange.operation, piece);
  const uint64_t first = rounds.next();
  for (size_t k = 0; k < pieces; ++k) {
    if (rank_ == source) {
      if (rank_ != root && !in_first) exchange.messages.wait_for(receives[k]);
      if (rounds.size() > 1) copy_bytes(rounds.open(first + k), at_offset(data_, k * piece), length(k));
      rounds.size() > 1 ? rounds.publish(first + k) : rounds.pass(first + k);
    } else {
      rounds.pass(first + k);
      copy_bytes(at_offset(data_, k * piece), rounds.read(first + k, plan_.local_of(source)), length(k));
    }
    if (k == 0 && rank_ == root) send();  // root's own node need not wait for other nodes' first messages
    if (k == 0) rounds.check_all(first);
    rounds.release(first + k);
  }
}

void CarriedCommunicator::gather_to_root(Exchange& exchange, const void* in, void* const* outs, size_t bytes) {
  using enum MessageChannel;
  const int root = exchange.operation.descriptor.root;
  const std::vector<int> others = others_of(root);
  const bool in_first = bytes <= First::kRoom;
  expect(others);
  for (const int peer : others) {
    if (!in_first || rank_ != root) tell(exchange, peer, in, in_first ? bytes : 0);
    if (!in_first && rank_ == root) exchange.messages.receive(peer, data, outs[peer], bytes);
  }
  for (const int peer : others) {
    if (in_first && rank_ != root) break;  // root has, or will have, everything
    const First& first = hear(exchange, peer);
    if (in_first) copy_bytes(outs[peer], first.data, bytes);
    if (!in_first && rank_ != root) exchange.messages.send(root, data, in, bytes);
  }
  if (plan_.node_of(root) != plan_.node()) return;
  std::vector<void*> of_node;
  for (const int rank : plan_.own()) of_node.push_back(rank_ == root ? outs[rank] : nullptr);
  ark::gather(node_->rounds(), exchange.operation, in, of_node.data(), bytes, plan_.local_of(root), kMostPiece);
}

void CarriedCommunicator::scatter_from_root(Exchange& exchange, const void* const* ins, void* out, size_t bytes) {
  using enum MessageChannel;
  const int root = exchange.operation.descriptor.root;
  const std::vector<int> others = others_of(root);
  const bool in_first = bytes <= First::kRoom;
  expect(others);
  for (const int peer : others) {
    if (!in_first || rank_ == root) tell(exchange, peer, in_first ? ins[peer] : nullptr, in_first ? bytes : 0);
    if (!in_first && rank_ != root) exchange.messages.receive(root, data, out, bytes);
  }
  for (const int peer : others) {
    if (in_first && rank_ == root) break;
    const First& first = hear(exchange, peer);
    if (in_first) copy_bytes(out, first.data, bytes);
    if (!in_first && rank_ == root) exchange.messages.send(peer, data, ins[peer], bytes);
  }
  if (plan_.node_of(root) != plan_.node()) return;
  std::vector<const void*> of_node;
  for (const int rank : plan_.own()) of_node.push_back(rank_ == root ? ins[rank] : nullptr);
  ark::scatter(node_->rounds(), exchange.operation, of_node.data(), out, bytes, plan_.local_of(root), kMostPiece);
}

// First messages carry the sizes. A peer must send exactly what this rank expects, and the carrier does not check that.
void CarriedCommunicator::exchange_blocks(Exchange& exchange, const Bytes* ins, const MutableBytes* outs) {
  using enum MessageChannel;
  const std::vector<int>& others = plan_.foreign();
  const auto in_first = [](size_t bytes) { return bytes <= First::kRoom; };
  expect(others);
  for (const int peer : others) {
    const Bytes& block = ins[peer];
    tell(exchange, peer, block.data, in_first(block.size) ? block.size : 0, block.size, outs[peer].size);
    if (!in_first(outs[peer].size)) exchange.messages.receive(peer, data, outs[peer].data, outs[peer].size);
  }
  for (const int peer : others) {
    const First& first = hear(exchange, peer);
    const Bytes& block = ins[peer];
    const MutableBytes& out = outs[peer];
    if (const auto error = broken_promise(exchange.operation, rank_, peer, rank_, first.bytes, out.size)) throw *error;
    if (const auto error = broken_promise(exchange.operation, rank_, rank_, peer, block.size, first.expected))
      throw *error;
    if (in_first(out.size)) copy_bytes(out.data, first.data, out.size);
    if (!in_first(block.size)) exchange.messages.send(peer, data, block.data, block.size);
  }
  exchange_in_node(exchange, ins, outs);
}

void CarriedCommunicator::exchange_in_node(Exchange& exchange, const Bytes* ins, const MutableBytes* outs) {
  std::vector<Bytes> to_node;
  std::vector<MutableBytes> from_node;
  for (const int rank : plan_.own()) to_node.push_back(ins[rank]), from_node.push_back(outs[rank]);
  ark::all_to_all(node_->rounds(), exchange.operation, to_node.data(), from_node.data(), kMostPiece);
}

}  // namespace ark
