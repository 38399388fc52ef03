// Collectives on CUDA tensors of a group over several nodes: kernels in each node, the stage between nodes by the NIC.
//
// Ranks at the same place of their nodes form a rail. all_reduce is a reduce_scatter in the node, a sum over the rail,
// and an all_gather in the node; the other collectives divide in the same way, so that every rank's NIC carries its
// share. Sums are those of the CPU's groups (CarriedCommunicator): by default each node's ranks in their order, then
// the nodes, with partial sums of 8- and 16-bit floats in float32; SumOrder has the other ways. The bits are the same
// on all ranks and in every run of a placement.
//
// Nodes may have different numbers of ranks: there are as many rails as the smallest has, and a rank beyond them takes
// part in its node's stages alone. What is a rank's own (a block of a gather, say) goes between nodes in turns: in turn
// t rail i carries the blocks of place i + t * rails. How many turns there are, and how large slices are, follows from
// the whole plan, so that both ends of a rail agree.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "collectives/cuda/between/between_stage.hpp"
#include "collectives/cuda/cuda_communicator.hpp"

namespace ark {

class NodesCommunicator final : public Communicator {
 public:
  static constexpr size_t kWhole = 64 << 10;  // what takes at most so many bytes to all nodes goes whole, in one hop
  static constexpr size_t kUnit = 16;         // bytes; parts start at multiples

  // node: of this node's ranks, by their places; where each node has one rank only share() uses it.
  NodesCommunicator(int rank, int size, NodePlan plan, std::shared_ptr<Communicator> node,
                    std::unique_ptr<BetweenStage> stage);

  // Whether it can carry such an operation; `even`: an all_to_all of equal parts on all ranks.
  static bool takes(Kind kind, bool even);

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
  int place() const { return plan_.local(); }  // of this rank in its node
  // Throws the error that ended the group, if any.
  void check(const OperationContext& context) {
    if (CudaCommunicator* const node = on_node()) node->check(context);
  }

  // As CudaCommunicator::share(), with a window between nodes. Its kernels' work is over when `keep` is let go; the
  // window lives until the next call after that, or as long as this object.
  struct Shared {
    std::unique_ptr<CudaCommunicator::Shared> here;  // of the node's ranks
    device::BetweenWindow window;
    std::vector<int> names, outside;  // ranks in the group: of this node by place, of this rail by node
    std::shared_ptr<void> keep;       // of all
  };
  std::unique_ptr<Shared> share(uint64_t bytes, uint64_t fingerprint, const rdma::GpuWindow::Shape& shape,
                                std::string& why);

 private:
  using Blocks = BetweenStage::Blocks;
  static size_t unit_of(size_t element) { return std::max<size_t>(1, kUnit / element); }
  static const std::byte* at(const void* data, size_t bytes) { return static_cast<const std::byte*>(data) + bytes; }
  static std::byte* at(void* data, size_t bytes) { return static_cast<std::byte*>(data) + bytes; }
  CudaCommunicator* on_node() const { return dynamic_cast<CudaCommunicator*>(node_.get()); }
  // The operation as its node's ranks see it.
  static Operation in_node(const Operation& operation, int root = -1);

  // A place in the group: member(node, place).
  int member(int node, int place) const { return plan_.members(node)[place]; }
  int here() const { return plan_.node(); }
  int nodes() const { return plan_.nodes(); }
  int places(int node) const { return static_cast<int>(plan_.members(node).size()); }
  int places() const { return places(here()); }
  int most_places() const { return plan_.most_in_node(); }
  bool lone() const { return places() == 1; }  // nothing to do in this node
  bool flat() const { return plan_.flat(); }   // nor in any other
  int rails() const { return plan_.rails(); }
  bool has_rail() const { return plan_.has_rail(); }

  int turns() const { return (most_places() + rails() - 1) / rails(); }
  // Ranks of a node whose blocks go in a turn; from place turn * rails() on, by the first rails.
  int in_turn(int node, int turn) const { return std::clamp(places(node) - turn * rails(), 0, rails()); }
  // Whether this rank carries a block for that node's ranks in a turn; for whom, if so.
  bool carries(int node, int turn) const { return place() < in_turn(node, turn); }
  int carried(int node, int turn) const { return member(node, place() + turn * rails()); }

  // Messages of an all_to_all in the node; what is not set is empty.
  struct Messages {
    explicit Messages(int places) : ins(places, Bytes{nullptr, 0}), outs(places, MutableBytes{nullptr, 0}) {}
    std::vector<Bytes> ins;
    std::vector<MutableBytes> outs;
  };
  void exchange(const Operation& operation, const Messages& messages);
  enum class Way { to_rail, from_rail };
  void hand_over(const Operation& operation, int turn, Way way, const void* from, void* to, size_t bytes);

  ElementRange part(size_t count, int place, size_t element) const;
  void spread_in_node(const Operation& operation, void* data, size_t count, size_t element, int only);
  std::byte* scratch(size_t offset = 0) const { return stage_->scratch() + offset; }

  // Sums (nodes_sums.cpp).
  using Brings = BetweenStage::Brings;
  struct Share {
    ElementRange range;  // this rank's part of the tensor
    const void* data;    // the node's sum of it, or this rank's input
    BetweenStage::Parts parts;
  };
  Brings brings(const Descriptor& descriptor) const;
  bool sums_here(const Operation& operation) const;
  size_t sent_for(Brings what, DType dtype) const;
  size_t most_at_once(size_t bytes, size_t element) const;
  BetweenStage::Parts inputs_at(size_t offset, size_t stride, Brings what) const;
  ElementRange sum_in_node(const Operation& operation, const void* in, void* out, size_t count);
  Operation between(const Operation& operation, Brings what);
  Share share(const Operation& operation, Brings what, const void* in, void* out, size_t count);
  void sum_whole(const Operation& operation, const Operation& outer, Brings what, const void* in, void* out,
                 size_t count);
  void all_reduce_slice(const Operation& operation, const Operation& outer, Brings what, const void* in, void* out,
                        size_t count);

  const NodePlan plan_;
  const std::shared_ptr<Communicator> node_;
  const std::unique_ptr<BetweenStage> stage_;
  struct RegionWindow {
    std::weak_ptr<void> used;
    std::unique_ptr<rdma::GpuWindow> window;
  };
  std::vector<RegionWindow> regions_;
};

}  // namespace ark
