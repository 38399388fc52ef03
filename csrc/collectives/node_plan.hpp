// Which rank does what in a group over several nodes: pure arithmetic, alike on all ranks.
//
// Nodes are numbered in the order in which ranks come to them, ranks within a node in the order of the group. Rank i of
// a node exchanges with rank i of every other one (a rail). Where nodes have different numbers of ranks, what all ranks
// of a node need comes to its rank i from rank i % (ranks there) of another node, and parts of large tensors go along
// as many rails as the smallest node has ranks.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace ark {

class NodePlan {
 public:
  // node_of[r]: the node of rank r, any numbers.
  NodePlan(const std::vector<int>& node_of, int rank);

  int nodes() const { return static_cast<int>(members_.size()); }
  int node() const { return node_[rank_]; }    // this rank's
  int local() const { return local_[rank_]; }  // this rank among its node's
  int node_of(int rank) const { return node_[rank]; }
  int local_of(int rank) const { return local_[rank]; }
  const std::vector<int>& members(int node) const { return members_[node]; }
  const std::vector<int>& own() const { return members_[node()]; }
  bool flat() const { return members_.size() == node_.size(); }  // one rank a node
  int rails() const { return rails_; }
  int most_in_node() const { return most_in_node_; }
  // The most ranks for which one stands, itself among them, on any node.
  int most_stood_for() const { return most_stood_for_; }

  // Which rank of a node stands for `rank`: itself in its own, else the one that sends to it and takes from it.
  int stands_for(int rank, int node) const {
    return members_[node][local_[rank] % static_cast<int>(members_[node].size())];
  }
  // The ranks of other nodes for which this rank stands, and those that stand for it; each once, in order.
  const std::vector<int>& peers() const { return peers_; }
  // The ranks of other nodes for which this rank stands.
  const std::vector<int>& targets() const { return targets_; }

  // Blocks of one rank for another of up to so many bytes go between nodes together with others, where that was
  // measured to be faster; 0: every block goes alone. With two ranks a node an all_to_all has as many messages in some
  // sizes. A round of the node's memory holds all that come to a rank.
  size_t parcel_limit() const { return parcel_limit_; }
  // `room`: what a first message carries. What is beyond takes three messages (both ranks' words and the data), for
  // each rank of a node or for all of them; the blocks of a gather that are not go to root in one hop.
  bool gathers_parcels(size_t bytes, size_t room) const { return bytes > room && bytes <= parcel_limit_; }
  // Root's messages leave one after the other; few are sooner there than what one rank spreads.
  bool scatters_parcels() const { return parcel_limit_ > 0 && most_in_node_ >= 8; }

  // "2 nodes (2 + 3 ranks), 2 rails"
  std::string text() const;

 private:
  int rank_;
  std::vector<int> node_, local_;  // of every rank
  std::vector<std::vector<int>> members_;
  std::vector<int> peers_, targets_;
  int rails_, most_in_node_ = 1, most_stood_for_ = 1;
  size_t parcel_limit_ = 0;
};

// A range of elements.
struct ElementRange {
  size_t begin = 0, count = 0;
};
// Part i of `total` elements in `parts`, nearly equal; all but the last are multiples of `unit`.
ElementRange part_of(size_t total, int parts, int i, size_t unit);

}  // namespace ark
