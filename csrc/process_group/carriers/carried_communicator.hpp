// A group whose ranks share no memory, or that of a node only: shared memory within each node, messages of another
// PyTorch backend (Gloo; made in Python) between nodes.
//
// Every collective is a stage in the node, an exchange between nodes, and a stage in the node again, where there is
// more than one rank; large ones go through the three chunk by chunk (carried_reduce.cpp, carried_moves.cpp). Where
// every rank is a node of its own, the exchange is all. The carrier only moves bytes, from and to the tensors
// themselves. Sums are ark's own, in rank order within a node and in node order between
// (collectives/cpu/staged_reduce.hpp); so the bits depend on the inputs and on which ranks are on which node, and are
// the same on every rank.
//
// Ranks agree before data move. Within a node each that reads another's first slot compares
// (collectives/cpu/rounds.hpp). Between nodes, ranks that exchange data send each other a first message, of one size
// always: what the sender believes it is in, and its data where they are small. A rank sends more data only to whoever
// has said so that it is in the same collective; where all data of a rooted collective are small, the first message
// goes their way alone. Whoever fails tells all (carried_notes.hpp), since a rank may wait for one that has not
// noticed; for a node of which nobody can tell there are beats (collectives/node_beats.hpp).
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "collectives/cpu/shm_communicator.hpp"
#include "collectives/cpu/staged_reduce.hpp"
#include "collectives/node_beats.hpp"
#include "collectives/node_plan.hpp"
#include "collectives/operation.hpp"
#include "process_group/carriers/carried_messages.hpp"
#include "process_group/carriers/carried_notes.hpp"

namespace ark {

class CarriedCommunicator : public Communicator {
 public:
  // node: the ranks of this rank's node, and their segments. notes: what carries news of failures; it should be another
  // network's where there is one. beats: with the same plan. flat_order: sums in the order of all ranks, alike on all
  // of them.
  CarriedCommunicator(int rank, int size, std::shared_ptr<Carrier> carrier, std::shared_ptr<Carrier> notes,
                      std::unique_ptr<NodeBeats> beats, NodePlan plan, Neighbourhood node, ShmOptions options,
                      bool flat_order);
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
    static constexpr size_t kRoom = 968;
    Descriptor descriptor;
    double factor;   // premul_sum where every rank is a node
    uint64_t bytes;  // all_to_all: what the sender sends to the receiver, and expects of it
    uint64_t expected;
    std::byte data[kRoom];
  };
  static_assert(sizeof(First) == 1024);

  struct Current;
  // One collective.
  struct Exchange {
    CarriedMessages& messages;
    const Operation& operation;
    const StagedReduce reduction;
    std::vector<int> heard = {};  // whose first messages have come
  };
  template <class Body>
  void guarded(const Operation& operation, Body&& body);
  void fail(const Error& error);
  void lost(int local);

  // First messages: expected from ranks, told to one, heard (and compared) from one.
  void expect(const std::vector<int>& peers);
  void expect_next(const std::vector<int>& peers);
  void tell(Exchange& exchange, int peer, const void* data = nullptr, size_t bytes = 0, uint64_t promised = 0,
            uint64_t expected = 0);
  const First& hear(Exchange& exchange, int peer);
  void hear_all(Exchange& exchange, const std::vector<int>& peers);
  void meet(Exchange& exchange, const std::vector<int>& peers);  // expects, and tells without data
  std::vector<int> partners_of(int root) const;
  std::vector<int> others_of(int root) const;  // of root: the ranks of other nodes; of those: root
  std::byte* scratch(size_t bytes);
  const double* factors_of_nodes(const Exchange& exchange);

  // Sums. root -1: everybody wants the result. carried_reduce.cpp has what is large.
  void sum_in_node(const Operation& operation, const StagedReduce& reduction, const void* in, size_t count,
                   std::byte* partial, bool wanted);
  void reduce_whole(Exchange& exchange, const void* in, void* out, size_t count, int root);
  class ChunkedReduce;
  void reduce_in_chunks(Exchange& exchange, const void* in, void* out, size_t count, int root);
  void reduce_blocks(Exchange& exchange, const void* const* ins, void* out, size_t count);

  // Sums in the order of all ranks (carried_order.cpp).
  bool in_flat_order(const Descriptor& descriptor) const;
  void exchange_any(Exchange& exchange, const std::vector<Bytes>& ins, const std::vector<MutableBytes>& outs);
  const double* factors_of_ranks(Exchange& exchange);
  void reduce_in_order(Exchange& exchange, const void* in, void* out, size_t count, int root);
  void reduce_blocks_in_order(Exchange& exchange, const void* const* ins, void* out, size_t count);

  // What only moves (carried_moves.cpp).
  void gather_whole(Exchange& exchange, const void* in, void* const* outs, size_t bytes);
  void gather_in_pieces(Exchange& exchange, const void* in, void* const* outs, size_t bytes);
  void broadcast_in_pieces(Exchange& exchange, void* data, size_t bytes);
  void gather_to_root(Exchange& exchange, const void* in, void* const* outs, size_t bytes);
  void scatter_from_root(Exchange& exchange, const void* const* ins, void* out, size_t bytes);
  void exchange_blocks(Exchange& exchange, const Bytes* ins, const MutableBytes* outs);

  // The same, together with others of a node (carried_parcels.cpp).
  class ParcelExchange;
  void gather_in_parcels(Exchange& exchange, const void* in, void* const* outs, size_t bytes);
  void scatter_in_parcels(Exchange& exchange, const void* const* ins, void* out, size_t bytes);
  void exchange_parcels(Exchange& exchange, const Bytes* ins, const MutableBytes* outs);
  void exchange_in_node(Exchange& exchange, const Bytes* ins, const MutableBytes* outs);

  const std::shared_ptr<Carrier> carrier_;
  const std::unique_ptr<NodeBeats> beats_;
  const NodePlan plan_;
  const bool flat_order_;
  std::vector<First> heard_, told_;  // by rank
  std::vector<std::byte> scratch_, parcels_, ordered_;
  std::vector<CarriedMessages::Work> left_;
  std::vector<double> factors_;
  std::atomic<uint64_t> sent_{0};
  std::mutex mutex_;  // of what follows
  CarriedMessages* now_ = nullptr;
  bool failed_ = false;
  // First messages that are expected, by rank. Those of the next collective are as soon as one has ended: a message
  // that is expected already leaves its sender at once.
  std::vector<CarriedMessages::Work> awaited_;
  std::optional<int> lost_early_;  // a rank of the node that was lost before node_ was there
  std::unique_ptr<ShmCommunicator> node_;
  std::unique_ptr<FailureNotes> notes_;
};

}  // namespace ark
