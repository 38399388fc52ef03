// Packs small blocks for all ranks of a node into one message (a parcel), for all_to_all, gather and scatter.
//
// With m and n ranks on two nodes, all_to_all sends m messages per direction instead of m n; gather and scatter send
// one instead of n. In gather and scatter, the rank that represents root collects or spreads its node's blocks.
#include <algorithm>
#include <cstring>

#include "collectives/agreement.hpp"
#include "collectives/cpu/algorithms.hpp"
#include "collectives/node_parcel.hpp"
#include "process_group/carriers/carried_communicator.hpp"

namespace ark {

namespace {

constexpr size_t kInNode = 512 << 10;  // of a round for blocks within root's node

}  // namespace

// all_to_all: a rank sends its blocks for another node to its representative there. The first message holds the sizes
// of all these blocks and of the blocks expected back, and the small blocks if they fit. Otherwise the small blocks
// follow at once as one message, for which the receiver posts the announced size.
//
// Each rank then publishes the first messages that it received in a round of shared memory. So every rank can compare
// all descriptors and the sizes of its own blocks, take its small blocks, and exchange large ones directly. If any
// parcel came as a separate message, a second round publishes those.
class CarriedCommunicator::ParcelExchange {
 public:
  ParcelExchange(CarriedCommunicator& of, Exchange& exchange, const Bytes* ins, const MutableBytes* outs)
      : of_(of),
        exchange_(exchange),
        plan_(of.plan_),
        rounds_(of.node_->rounds()),
        ins_(ins),
        outs_(outs),
        senders_(plan_.targets()),
        ranks_(static_cast<int>(plan_.own().size())),
        promised_(static_cast<size_t>(of.size_) * ranks_),
        place_(of.size_) {
    std::vector<int> shown(ranks_);  // number of first messages that each rank of this node publishes
    for (const int rank : plan_.foreign()) place_[rank] = shown[shows(rank)]++;
  }

  void run() {
    of_.expect(senders_);
    for (const int rank : plan_.foreign())
      if (!small(outs_[rank].size)) exchange_.messages.receive(rank, results, outs_[rank].data, outs_[rank].size);
    send_parcels();
    of_.hear_all(exchange_, senders_);
    receive_parcels();
    show_first_messages();
    for (const int rank : plan_.foreign())
      if (!small(ins_[rank].size)) exchange_.messages.send(rank, results, ins_[rank].data, ins_[rank].size);
    of_.exchange_in_node(exchange_, ins_, outs_);  // overlaps with the messages in flight
    spread_parcels();
  }

 private:
  using enum MessageChannel;

  static size_t room(size_t ranks) { return First::kRoom - 2 * ranks * sizeof(uint64_t); }
  bool small(size_t bytes) const { return bytes <= plan_.parcel_limit(); }
  int shows(int rank) const { return plan_.local_of(plan_.stands_for(rank, plan_.node())); }
  const uint64_t* promised(int rank) const { return promised_.data() + static_cast<size_t>(rank) * ranks_; }
  NodeParcel parcel_of(int rank) const { return {promised(rank), ranks_, plan_.parcel_limit()}; }
  bool apart(int rank) const { return parcel_of(rank).bytes() > room(ranks_); }

  void pack(std::byte* to, const std::vector<int>& members) const {
    for (const int rank : members) {
      if (!small(ins_[rank].size)) continue;
      copy_bytes(to, ins_[rank].data, ins_[rank].size);
      to += ins_[rank].size;
    }
  }

  void send_parcels() {
    size_t bytes = 0;
    for (const int rank : plan_.foreign()) bytes += small(ins_[rank].size) ? ins_[rank].size : 0;
    if (of_.parcels_.size() < bytes) of_.parcels_.resize(bytes);
    std::byte* memory = of_.parcels_.data();
    for (const int node : plan_.others()) {
      const std::vector<int>& members = plan_.members(node);
      const size_t ranks = members.size();
      std::byte text[First::kRoom];
      std::vector<uint64_t> words;
      for (const int rank : members) words.push_back(ins_[rank].size);
      const size_t parcel = NodeParcel(words.data(), static_cast<int>(ranks), plan_.parcel_limit()).bytes();
      for (const int rank : members) words.push_back(outs_[rank].size);
      const size_t head = words.size() * sizeof(uint64_t);
      copy_bytes(text, words.data(), head);
      const int peer = plan_.stands_for(of_.rank_, node);
      const bool in_first = parcel <= room(ranks);
      if (in_first) pack(text + head, members);
      of_.tell(exchange_, peer, text, head + (in_first ? parcel : 0));
      if (in_first) continue;
      pack(memory, members);
      exchange_.messages.send(peer, data, memory, parcel);
      memory += parcel;
    }
  }

  // Publishes the first messages from other nodes to all ranks of this node.
  void show_first_messages() {
    rounds_.begin(exchange_.operation, senders_.size() * sizeof(First));
    const uint64_t round = rounds_.next();
    std::byte* slot = rounds_.open(round);
    for (const int rank : senders_) copy_bytes(slot + place_[rank] * sizeof(First), &of_.heard_[rank], sizeof(First));
    rounds_.publish(round);
    for (int local = 0; local < ranks_; ++local)
      if (local != rounds_.rank()) rounds_.read(round, local);  // compares descriptors
    for (const int rank : plan_.foreign()) take(rank, round);
    rounds_.release(round);
  }

  void read_sizes(int rank, const First& first) {
    std::memcpy(promised_.data() + static_cast<size_t>(rank) * ranks_, first.data, ranks_ * sizeof(uint64_t));
  }

  void take(int rank, uint64_t round) {
    First copied;  // another rank's memory may change, so work on a copy
    const First* first = &of_.heard_[rank];
    if (shows(rank) != rounds_.rank()) {
      std::memcpy(&copied, rounds_.read(round, shows(rank)) + place_[rank] * sizeof(First), sizeof(First));
      first = &copied;
    }
    const Operation& operation = exchange_.operation;
    if (const auto error = disagreement(operation, first->descriptor, of_.rank_, rank)) throw *error;
    const size_t row = ranks_ * sizeof(uint64_t);
    read_sizes(rank, *first);
    uint64_t expected;
    std::memcpy(&expected, first->data + row + plan_.local() * sizeof(uint64_t), sizeof expected);
    const uint64_t size = promised(rank)[plan_.local()];
    if (const auto error = broken_promise(operation, of_.rank_, rank, of_.rank_, size, outs_[rank].size)) throw *error;
    if (const auto error = broken_promise(operation, of_.rank_, of_.rank_, rank, ins_[rank].size, expected))
      throw *error;
    if (small(size) && !apart(rank))
      copy_bytes(outs_[rank].data, first->data + 2 * row + parcel_of(rank).offset(plan_.local()), size);
  }

  void receive_parcels() {
    size_t bytes = 0;
    for (const int rank : senders_) {
      read_sizes(rank, of_.heard_[rank]);
      bytes += apart(rank) ? parcel_of(rank).bytes() : 0;
    }
    std::byte* memory = of_.scratch(bytes);
    come_bytes_ = bytes;
    for (const int rank : senders_) {
      if (!apart(rank)) continue;
      come_.push_back(exchange_.messages.receive(rank, data, memory, parcel_of(rank).bytes(), true));
      memory += parcel_of(rank).bytes();
    }
  }

  void spread_parcels() {
    const auto any = [&] {
      for (const int rank : plan_.foreign())
        if (apart(rank)) return true;
      return false;
    };
    if (!any()) return;  // the same result on all ranks of the node
    rounds_.begin(exchange_.operation, come_bytes_);
    const uint64_t round = rounds_.next();
    for (const size_t message : come_) exchange_.messages.wait_for(message);
    copy_bytes(rounds_.open(round), of_.scratch(come_bytes_), come_bytes_);
    rounds_.publish(round);
    std::vector<size_t> at(ranks_);  // offset in each local rank's slot, where parcels have the order of its senders_
    for (const int rank : plan_.foreign()) {
      if (!apart(rank)) continue;
      const NodeParcel parcel = parcel_of(rank);
      const int local = shows(rank);
      const size_t begin = at[local];
      at[local] += parcel.bytes();
      if (!parcel.holds(plan_.local())) continue;
      const std::byte* slot = local == rounds_.rank() ? of_.scratch(come_bytes_) : rounds_.read(round, local);
      copy_bytes(outs_[rank].data, slot + begin + parcel.offset(plan_.local()), outs_[rank].size);
    }
    rounds_.release(round);
  }

  CarriedCommunicator& of_;
  Exchange& exchange_;
  const NodePlan& plan_;
  Rounds& rounds_;
  const Bytes* ins_;
  const MutableBytes* outs_;
  const std::vector<int>& senders_;  // ranks whose first messages and parcels this rank receives
  const int ranks_;                  // of this node
  std::vector<uint64_t> promised_;   // by sender, then by local rank
  std::vector<size_t> place_;        // a sender's place among the first messages that one local rank publishes
  std::vector<size_t> come_;         // receives of separate parcels
  size_t come_bytes_ = 0;
};

void CarriedCommunicator::exchange_parcels(Exchange& exchange, const Bytes* ins, const MutableBytes* outs) {
  ParcelExchange(*this, exchange, ins, outs).run();
}

void CarriedCommunicator::gather_in_parcels(Exchange& exchange, const void* in, void* const* outs, size_t bytes) {
  using enum MessageChannel;
  const int root = exchange.operation.descriptor.root;
  const std::vector<int> partners = partners_of(root);
  const auto parcel = [&](int node) { return plan_.members(node).size() * bytes; };
  Rounds& rounds = node_->rounds();
  if (plan_.node_of(root) == plan_.node()) {
    std::byte* memory = scratch(rank_ == root ? static_cast<size_t>(size_) * bytes : 0);
    std::vector<size_t> receives;
    meet(exchange, partners);
    for (const int peer : partners) {
      const size_t come = parcel(plan_.node_of(peer));
      receives.push_back(exchange.messages.receive(peer, data, memory, come, true));
      memory += come;
    }
    std::vector<void*> of_node;
    for (const int rank : plan_.own()) of_node.push_back(rank_ == root ? outs[rank] : nullptr);
    ark::gather(rounds, exchange.operation, in, of_node.data(), bytes, plan_.local_of(root), kInNode);
    const std::byte* from = scratch_.data();
    for (size_t i = 0; i < partners.size(); ++i) {
      hear(exchange, partners[i]);
      exchange.messages.wait_for(receives[i]);
      for (const int rank : plan_.members(plan_.node_of(partners[i])))
        copy_bytes(outs[rank], from, bytes), from += bytes;
    }
    return;
  }
  const bool collects = !partners.empty();
  meet(exchange, partners);
  rounds.begin(exchange.operation, bytes);
  const uint64_t round = rounds.next();
  copy_bytes(rounds.open(round), in, collects ? 0 : bytes);
  rounds.publish(round);
  std::byte* blocks = scratch(collects ? parcel(plan_.node()) : 0);
  for (int i = 0; collects && i < rounds.size(); ++i)
    copy_bytes(blocks + i * bytes, i == rounds.rank() ? in : rounds.read(round, i), bytes);
  rounds.check_all(round);
  rounds.release(round);
  if (!collects) return;
  hear(exchange, root);
  exchange.messages.send(root, data, blocks, parcel(plan_.node()));
}

void CarriedCommunicator::scatter_in_parcels(Exchange& exchange, const void* const* ins, void* out, size_t bytes) {
  using enum MessageChannel;
  const int root = exchange.operation.descriptor.root;
  const std::vector<int> partners = partners_of(root);
  const auto parcel = [&](int node) { return plan_.members(node).size() * bytes; };
  Rounds& rounds = node_->rounds();
  expect(partners);
  if (plan_.node_of(root) == plan_.node()) {
    std::byte* memory = scratch(rank_ == root ? static_cast<size_t>(size_) * bytes : 0);
    std::vector<const std::byte*> parcels;
    for (const int peer : partners) {
      const int node = plan_.node_of(peer);
      parcels.push_back(memory);
      for (const int rank : plan_.members(node)) copy_bytes(memory, ins[rank], bytes), memory += bytes;
      const bool in_first = parcel(node) <= First::kRoom;
      tell(exchange, peer, parcels.back(), in_first ? parcel(node) : 0);
    }
    std::vector<const void*> of_node;
    for (const int rank : plan_.own()) of_node.push_back(rank_ == root ? ins[rank] : nullptr);
    ark::scatter(rounds, exchange.operation, of_node.data(), out, bytes, plan_.local_of(root), kInNode);
    for (size_t i = 0; i < partners.size(); ++i) {
      const size_t leaves = parcel(plan_.node_of(partners[i]));
      if (leaves <= First::kRoom) continue;  // everything went with the first message
      hear(exchange, partners[i]);
      exchange.messages.send(partners[i], data, parcels[i], leaves);
    }
    return;
  }
  const size_t come = parcel(plan_.node());
  const bool in_first = come <= First::kRoom, spreads = !partners.empty();
  rounds.begin(exchange.operation, spreads ? come : 0);
  const uint64_t round = rounds.next();
  const std::byte* blocks = nullptr;
  if (spreads) {
    std::byte* memory = scratch(come);
    size_t receive = 0;
    if (!in_first) {
      tell(exchange, root);
      receive = exchange.messages.receive(root, data, memory, come, true);
    }
    const First& first = hear(exchange, root);
    if (!in_first) exchange.messages.wait_for(receive);
    blocks = in_first ? first.data : memory;
    copy_bytes(rounds.open(round), blocks, come);
    rounds.publish(round);
  } else {
    rounds.pass(round);
    blocks = rounds.read(round, plan_.local_of(plan_.stands_for(root, plan_.node())));
  }
  copy_bytes(out, blocks + plan_.local() * bytes, bytes);
  rounds.check_all(round);
  rounds.release(round);
}

}  // namespace ark
