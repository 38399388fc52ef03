// Collectives on CUDA tensors of a group over several nodes: kernels in each node, the stage between nodes by the NIC.
//
// Ranks at the same place of their nodes form a rail. all_reduce is a reduce_scatter in the node, a sum over the rail,
// and an all_gather in the node; the other collectives divide in the same way, so that every rank's NIC carries its
// share. A node's sum is rounded to the tensors' type before nodes are added, in their order; the bits are the same on
// all ranks and in every run of a placement. All nodes have equally many ranks.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "collectives/cuda/between/between_stage.hpp"

namespace ark {

class NodesCommunicator final : public Communicator {
 public:
  // node: of this node's ranks, by their places; not used where each node has one rank.
  NodesCommunicator(int rank, int size, NodePlan plan, std::shared_ptr<Communicator> node,
                    std::unique_ptr<BetweenStage> stage);

  // Whether it can carry such an operation; `even`: an all_to_all of equal parts on all ranks.
  static bool takes(Kind kind, ReduceOp op, bool even);

  void all_reduce(const Operation&, const void* in, void* out, size_t count) override;
  void reduce(const Operation&, const void* in, void* out, size_t count) override;
  void reduce_scatter(const Operation&, const void* const* ins, void* out, size_t count) override;
  void all_gather(const Operation&, const void* in, void* const* outs, size_t bytes) override;
  void broadcast(const Operation&, void* data, size_t bytes) override;
  void gather(const Operation&, const void* in, void* const* outs, size_t bytes) override;
  void scatter(const Operation&, const void* const* ins, void* out, size_t bytes) override;
  void all_to_all(const Operation&, const Bytes* ins, const MutableBytes* outs) override;  // equal parts
  void barrier(const Operation&) override;

  BetweenStage& stage() { return *stage_; }

 private:
  using Blocks = BetweenStage::Blocks;
  // A place in the group: member(node, place).
  int member(int node, int place) const { return plan_.members(node)[place]; }
  int here() const { return plan_.node(); }
  int place() const { return plan_.local(); }
  int nodes() const { return plan_.nodes(); }
  int places() const { return static_cast<int>(plan_.own().size()); }
  bool lone() const { return places() == 1; }

  ElementRange sum_in_node(const Operation& operation, const void* in, void* out, size_t count);
  ElementRange part(size_t count, int place, size_t element) const;
  void spread_in_node(const Operation& operation, void* data, size_t count, size_t element, int only);
  void sum_whole(const Operation& operation, const void* in, void* out, size_t count);
  std::byte* scratch(size_t offset = 0) const { return stage_->scratch() + offset; }

  const NodePlan plan_;
  const std::shared_ptr<Communicator> node_;
  const std::unique_ptr<BetweenStage> stage_;
};

}  // namespace ark
