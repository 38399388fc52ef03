// Numbers the nodes and decides which ranks exchange data.
#include "collectives/node_plan.hpp"

#include <algorithm>
#include <map>

namespace ark {

namespace {

// A block in a parcel is copied three more times, which at some tens of KB costs as much as a separate message.
constexpr size_t kMostParcelBlock = 16 << 10;
constexpr size_t kParcelRound = 1 << 20;  // of all parcels in a round
// First messages hold the sizes for all ranks of a node and reach a rank in one round, 1 KB each.
constexpr int kMostInParcelNode = 32, kMostParcels = 1000;
constexpr int kLeastInParcelNode = 3;

}  // namespace

NodePlan::NodePlan(const std::vector<int>& node_of, int rank) : rank_(rank) {
  std::map<int, int> numbers;
  for (const int given : node_of) {
    const int node = numbers.try_emplace(given, static_cast<int>(numbers.size())).first->second;
    if (node == nodes()) members_.emplace_back();
    node_.push_back(node);
    local_.push_back(static_cast<int>(members_[node].size()));
    members_[node].push_back(static_cast<int>(local_.size()) - 1);
  }
  rails_ = static_cast<int>(members_[0].size());
  for (const auto& node : members_) {
    const int ranks = static_cast<int>(node.size());
    rails_ = std::min(rails_, ranks);
    most_in_node_ = std::max(most_in_node_, ranks);
    int stood_for = 1;  // ranks that its first rank represents
    for (const auto& other : members_)
      if (&other != &node) stood_for += (static_cast<int>(other.size()) + ranks - 1) / ranks;
    most_stood_for_ = std::max(most_stood_for_, stood_for);
  }
  const bool named = most_in_node_ <= kMostInParcelNode && most_stood_for_ <= kMostParcels;
  if (most_in_node_ >= kLeastInParcelNode && named) {
    const size_t round = kParcelRound / (static_cast<size_t>(most_stood_for_) * most_in_node_);
    parcel_limit_ = std::min(kMostParcelBlock, round);
  }
  for (int step = 1; step < nodes(); ++step) others_.push_back((node() + step) % nodes());
  for (const int there : others_) foreign_.insert(foreign_.end(), members_[there].begin(), members_[there].end());
  for (const int other : foreign_) {
    const bool target = stands_for(other, node()) == rank;
    if (target) targets_.push_back(other);
    if (target || stands_for(rank, node_[other]) == other) peers_.push_back(other);
  }
}

std::string NodePlan::text() const {
  std::string text = std::to_string(nodes()) + (nodes() == 1 ? " node (" : " nodes (");
  for (int node = 0; node < nodes(); ++node) text += (node > 0 ? " + " : "") + std::to_string(members_[node].size());
  text += node_.size() == 1 ? " rank), " : " ranks), ";
  return text + std::to_string(rails_) + (rails_ == 1 ? " rail" : " rails");
}

ElementRange part_of(size_t total, int parts, int i, size_t unit) {
  const size_t each = (total + parts - 1) / parts, step = (each + unit - 1) / unit * unit;
  const size_t begin = std::min(total, step * i);
  return {begin, std::min(step, total - begin)};
}

}  // namespace ark
