// Communicator for a group that spans several nodes: shared memory within a node, messages of a carrier (Gloo or RDMA)
// between nodes.
//
// Every collective has a stage in the node, an exchange between nodes and another stage in the node. Large ones
// pipeline the stages chunk by chunk (carried_reduce.cpp, carried_moves.cpp). The carrier only moves bytes, directly
// from and to tensors. ark itself adds: in rank order within a node, then in node order
// (collectives/cpu/staged_reduce.hpp). So the bits depend only on the inputs and the placement of ranks, and are the
// same on every rank.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "collectives/carried_path.hpp"
#include "collectives/cpu/shm_communicator.hpp"
#include "collectives/cpu/staged_reduce.hpp"
#include "collectives/node_beats.hpp"
#include "collectives/node_plan.hpp"
#include "collectives/operation.hpp"
#include "collectives/sum_order.hpp"
#include "process_group/carriers/carried_messages.hpp"
#include "process_group/carriers/carried_notes.hpp"

namespace ark {

// Ranks agree before data moves. Within a node, each reader of another rank's first slot compares descriptors
// (collectives/cpu/rounds.hpp). Between nodes, ranks that exchange data first send each other a message of fixed size
// with the collective's descriptor, and with the data if it is small. A rank sends more data only to a peer whose first
// message shows the same collective. If all data of a rooted collective is small, only that direction sends first
// messages.
//
// A rank that fails tells all others (carried_notes.hpp), because a rank may wait for one that has not noticed. Node
// beats (collectives/node_beats.hpp) detect a node of which no rank can tell.
class CarriedCommunicator : public Communicator {
 public:
  // node: the ranks of this rank's node and their segments. notes: carries news of failures, over another network if
  // there is one. beats: made from the same plan. sums: the same on all ranks.
  CarriedCommunicator(int rank, int size, std::shared_ptr<Carrier> carrier, std::shared_ptr<Carrier> notes,
                      std::unique_ptr<NodeBeats> beats, NodePlan plan, Neighbourhood node, ShmOptions options,
                      SumOrder sums);
  ~CarriedCommunicator() override;

  void all_reduce(const Operation&, const void* in, void* out, size_t count) override;
  void reduce(const Operation&, const void* in, void* out, size_t count) override;
  void reduce_scatter(const Operation&, const void* const* ins, void* out, size_t count) override;
  void all_gather(const Operation&, const void* in, void* const* outs, size_t bytes) override;
  void broadcast(const Operation&, void* data, size_t bytes) override;
  void gather(const Operation&, const void* in, void* const* outs, size_t bytes) override;
  void scatter(const Operation&, const void* const* ins, void* out, size_t bytes) override;
  void all_to_all(const Operation&, const Bytes* ins, const MutableBytes* outs) override;
  void barrier(const Operation&) override;
  void abort(const Error&) override;
  void close() override;
  GroupHealth& node_health() { return node_->health(); }
  uint64_t messages_sent() const { return sent_.load(std::memory_order_relaxed); }  // by this rank, in collectives

 private:
  struct First {
    static constexpr size_t kRoom = kFirstRoom;
    Descriptor descriptor;
    double factor;   // for premul_sum when every rank is its own node
    uint64_t bytes;  // all_to_all: the sender's block for the receiver, and the block it expects back
    uint64_t expected;
    std::byte data[kRoom];
  };
  static_assert(sizeof(First) == kFirstMessage);

  struct Current;
  // The state of one collective.
  struct Exchange {
    CarriedMessages& messages;
    const Operation& operation;
    const StagedReduce reduction;
    std::vector<int> heard = {};  // peers whose first messages have arrived
  };
  template <class Body>
  void guarded(const Operation& operation, Body&& body);
  void fail(const Error& error);
  void lost(int local);
  void raise_what_the_node_knows(const OperationContext& context);

  // First messages: post the receives, send one, or wait for one and compare it.
  // needed: by the collective that runs, so a peer that is gone ends it.
  void expect(const std::vector<int>& peers, bool needed = true);
  void expect_next(const std::vector<int>& peers);
  void tell(Exchange& exchange, int peer, const void* data = nullptr, size_t bytes = 0, uint64_t promised = 0,
            uint64_t expected = 0);
  const First& hear(Exchange& exchange, int peer);
  void hear_all(Exchange& exchange, const std::vector<int>& peers);
  void meet(Exchange& exchange, const std::vector<int>& peers);  // expect(), and tell() without data
  CarriedPath path_of(const Exchange& exchange, size_t bytes) const;
  std::vector<int> partners_of(int root) const;
  std::vector<int> others_of(int root) const;  // at root: the ranks of other nodes; at those: root
  std::byte* scratch(size_t bytes);
  const double* factors_of_nodes(const Exchange& exchange);

  // Sums. root -1: every rank wants the result. Large ones are in carried_reduce.cpp.
  void sum_in_node(const Operation& operation, const StagedReduce& reduction, const void* in, size_t count,
                   std::byte* partial, bool wanted);
  void reduce_whole(Exchange& exchange, const void* in, void* out, size_t count, int root);
  class ChunkedReduce;
  void reduce_in_chunks(Exchange& exchange, const void* in, void* out, size_t count, int root);
  void reduce_blocks(Exchange& exchange, const void* const* ins, void* out, size_t count);

  bool rounds_partials(const Descriptor& descriptor) const;
  // Sums in the order of all ranks (carried_order.cpp).
  bool in_flat_order(const Descriptor& descriptor) const;
  void exchange_any(Exchange& exchange, const std::vector<Bytes>& ins, const std::vector<MutableBytes>& outs);
  const double* factors_of_ranks(Exchange& exchange);
  void reduce_in_order(Exchange& exchange, const void* in, void* out, size_t count, int root);
  void reduce_blocks_in_order(Exchange& exchange, const void* const* ins, void* out, size_t count);

  // Collectives that only move bytes (carried_moves.cpp).
  void gather_whole(Exchange& exchange, const void* in, void* const* outs, size_t bytes);
  void gather_in_pieces(Exchange& exchange, const void* in, void* const* outs, size_t bytes);
  void broadcast_in_pieces(Exchange& exchange, void* data, size_t bytes);
  void gather_to_root(Exchange& exchange, const void* in, void* const* outs, size_t bytes);
  void scatter_from_root(Exchange& exchange, const void* const* ins, void* out, size_t bytes);
  void exchange_blocks(Exchange& exchange, const Bytes* ins, const MutableBytes* outs);

  // The same with one message per pair of nodes (carried_parcels.cpp).
  class ParcelExchange;
  void gather_in_parcels(Exchange& exchange, const void* in, void* const* outs, size_t bytes);
  void scatter_in_parcels(Exchange& exchange, const void* const* ins, void* out, size_t bytes);
  void exchange_parcels(Exchange& exchange, const Bytes* ins, const MutableBytes* outs);
  void exchange_in_node(Exchange& exchange, const Bytes* ins, const MutableBytes* outs);

  const std::shared_ptr<Carrier> carrier_;
  const std::unique_ptr<NodeBeats> beats_;
  const NodePlan plan_;
  const SumOrder sums_;              // without meaning where each node has one rank
  std::vector<First> heard_, told_;  // by rank
  std::vector<std::byte> scratch_, parcels_, ordered_;
  std::vector<CarriedMessages::Work> left_;
  std::vector<double> factors_;
  std::atomic<uint64_t> sent_{0};
  std::mutex mutex_;  // guards the members below
  CarriedMessages* now_ = nullptr;
  bool failed_ = false;
  // Posted receives for first messages, by rank. Those of the next collective are posted when one ends, so that a
  // sender finds its receive posted and can send at once.
  std::vector<CarriedMessages::Work> awaited_;
  std::optional<int> lost_early_;  // a rank of the node that was lost before node_ existed
  std::unique_ptr<ShmCommunicator> node_;
  std::unique_ptr<FailureNotes> notes_;
};

}  // namespace ark
