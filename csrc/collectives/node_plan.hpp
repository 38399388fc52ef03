// The roles of ranks in a group over several nodes. Pure arithmetic, equal on all ranks.
//
// Nodes are numbered in order of their first rank, ranks within a node in group order. Rank i of a node exchanges with
// rank i of every other node (a rail). If nodes differ in size, rank i receives from rank i % (ranks there) of another
// node what its whole node needs, and large tensors use as many rails as the smallest node has ranks.
//
// A node begins with the next one and wraps around. If all began with node 0, its ranks would get the first messages of
// all others at once, and those of the last node would wait. Sums have another order: they index partials by node.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace ark {

class NodePlan {
 public:
  // node_of[r]: the node of rank r, any numbers.
  NodePlan(const std::vector<int>& node_of, int rank);

  int ranks() const { return static_cast<int>(node_.size()); }
  int nodes() const { return static_cast<int>(members_.size()); }
  int node() const { return node_[rank_]; }    // of this rank
  int local() const { return local_[rank_]; }  // index of this rank in its node
  int node_of(int rank) const { return node_[rank]; }
  int local_of(int rank) const { return local_[rank]; }
  const std::vector<int>& members(int node) const { return members_[node]; }
  const std::vector<int>& own() const { return members_[node()]; }
  // The other nodes, in the order in which this node sends to them: the next one first, wrapping around.
  const std::vector<int>& others() const { return others_; }
  // Their ranks, node by node in that order.
  const std::vector<int>& foreign() const { return foreign_; }
  bool flat() const { return members_.size() == node_.size(); }  // one rank per node
  int rails() const { return rails_; }
  bool has_rail() const { return local() < rails_; }  // this rank
  int most_in_node() const { return most_in_node_; }
  // The most ranks, including itself, that any rank represents.
  int most_stood_for() const { return most_stood_for_; }

  // The rank of `node` that represents `rank`: itself in its own node, else the one that exchanges data with it.
  int stands_for(int rank, int node) const {
    return members_[node][local_[rank] % static_cast<int>(members_[node].size())];
  }
  // The ranks of other nodes that this rank represents or that represent it; each once, in order of foreign().
  const std::vector<int>& peers() const { return peers_; }
  // The ranks of other nodes that this rank represents, in order of foreign().
  const std::vector<int>& targets() const { return targets_; }

  // Blocks of up to this many bytes go between nodes as parcels, where that was measured to be faster; 0: every block
  // goes alone. With two ranks per node parcels save no messages at some sizes. A round of the node's memory holds all
  // parcels of a rank.
  size_t parcel_limit() const { return parcel_limit_; }
  // `room`: payload of a first message. A larger block takes three messages (both first messages and the data), per
  // rank or per parcel. Smaller blocks of a gather go to root in one hop.
  bool gathers_parcels(size_t bytes, size_t room) const { return bytes > room && bytes <= parcel_limit_; }
  // Root's messages leave one after the other; a few arrive sooner than what one rank would spread.
  bool scatters_parcels() const { return parcel_limit_ > 0 && most_in_node_ >= 8; }

  // For example "2 nodes (2 + 3 ranks), 2 rails".
  std::string text() const;

 private:
  int rank_;
  std::vector<int> node_, local_;  // of every rank
  std::vector<std::vector<int>> members_;
  std::vector<int> others_, foreign_, peers_, targets_;
  int rails_, most_in_node_ = 1, most_stood_for_ = 1;
  size_t parcel_limit_ = 0;
};

// A range of elements.
struct ElementRange {
  size_t begin = 0, count = 0;
};
// Part i of `total` elements in `parts` nearly equal parts; all but the last are multiples of `unit`.
ElementRange part_of(size_t total, int parts, int i, size_t unit);

}  // namespace ark
