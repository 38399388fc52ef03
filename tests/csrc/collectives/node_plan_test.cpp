// Tests which ranks exchange data in groups over several nodes, and how parts are cut.
#include "collectives/node_plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>

namespace ark {
namespace {

const std::vector<std::vector<int>> kPlacements = {{0},          {0, 1},          {0, 0, 1, 1},    {7, 7, 3, 3, 3},
                                                   {1, 0, 0, 0}, {0, 1, 0, 2, 1}, {0, 0, 0, 1, 2}, {0, 1, 1, 2, 2, 2}};

bool holds(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

TEST(NodePlan, NumbersNodesAsRanksComeToThem) {
  const NodePlan plan({7, 3, 7, 9, 3}, 4);
  EXPECT_EQ(plan.nodes(), 3);
  EXPECT_EQ(plan.node(), 1);
  EXPECT_EQ(plan.local(), 1);
  EXPECT_EQ(plan.members(0), (std::vector<int>{0, 2}));
  EXPECT_EQ(plan.own(), (std::vector<int>{1, 4}));
  EXPECT_EQ(plan.members(2), (std::vector<int>{3}));
  EXPECT_EQ(plan.rails(), 1);
  EXPECT_EQ(plan.most_in_node(), 2);
  EXPECT_EQ(plan.text(), "3 nodes (2 + 2 + 1 ranks), 1 rail");
}

TEST(NodePlan, RailsOfEvenNodes) {
  for (int rank = 0; rank < 6; ++rank) {
    const NodePlan plan({0, 0, 1, 1, 2, 2}, rank);
    EXPECT_FALSE(plan.flat());
    EXPECT_EQ(plan.rails(), 2);
    const std::vector<int> rail = {(rank + 2) % 6, (rank + 4) % 6};  // the next node's first
    EXPECT_EQ(plan.peers(), rail);
    EXPECT_EQ(plan.targets(), rail);
  }
}

TEST(NodePlan, FlatWhereEveryRankIsANode) {
  const NodePlan plan({4, 2, 0}, 1);
  EXPECT_TRUE(plan.flat());
  EXPECT_EQ(plan.peers(), (std::vector<int>{2, 0}));
  EXPECT_EQ(plan.text(), "3 nodes (1 + 1 + 1 ranks), 1 rail");
}

// In every step each node sends to another one, so that no rank hears from all others at once.
TEST(NodePlan, EveryNodeBeginsWithTheNextOne) {
  EXPECT_EQ(NodePlan({0, 0, 1, 2, 1, 2}, 2).others(), (std::vector<int>{2, 0}));
  EXPECT_EQ(NodePlan({0, 0, 1, 2, 1, 2}, 2).foreign(), (std::vector<int>{3, 5, 0, 1}));
  for (const auto& nodes : kPlacements) {
    std::vector<NodePlan> plans;
    for (int rank = 0; rank < static_cast<int>(nodes.size()); ++rank) plans.emplace_back(nodes, rank);
    for (int step = 0; step < plans[0].nodes() - 1; ++step) {
      std::vector<int> receivers;
      for (int node = 0; node < plans[0].nodes(); ++node)
        receivers.push_back(plans[plans[0].members(node)[0]].others()[step]);
      std::sort(receivers.begin(), receivers.end());
      EXPECT_EQ(std::unique(receivers.begin(), receivers.end()), receivers.end());
    }
    for (const NodePlan& plan : plans) {
      EXPECT_EQ(static_cast<int>(plan.others().size()), plan.nodes() - 1);
      EXPECT_EQ(plan.foreign().size() + plan.own().size(), nodes.size());
      std::vector<int> in_order;  // the same ranks node by node
      for (const int node : plan.others())
        for (const int rank : plan.members(node)) in_order.push_back(rank);
      EXPECT_EQ(plan.foreign(), in_order);
      const auto follows = [&](const std::vector<int>& ranks) {
        size_t next = 0;
        for (const int rank : in_order) next += next < ranks.size() && ranks[next] == rank ? 1 : 0;
        return next == ranks.size();
      };
      EXPECT_TRUE(follows(plan.peers()));
      EXPECT_TRUE(follows(plan.targets()));
    }
  }
}

TEST(NodePlan, SmallBlocksGoTogetherInNodesOfThreeRanksAndMore) {
  EXPECT_EQ(NodePlan(std::vector<int>(33), 0).parcel_limit(), 0u);  // no room for their sizes
  for (const auto& nodes : kPlacements) {
    for (int rank = 0; rank < static_cast<int>(nodes.size()); ++rank) {
      const NodePlan plan(nodes, rank);
      EXPECT_EQ(plan.parcel_limit(), plan.most_in_node() < 3 ? 0u : 16384u);
      // What a rank receives for its node fits in one round.
      EXPECT_LE(plan.targets().size() * plan.own().size() * plan.parcel_limit(), 1u << 20);
    }
  }
  std::vector<int> many(512);  // 64 nodes of 8
  for (int rank = 0; rank < 512; ++rank) many[rank] = rank / 8;
  EXPECT_EQ(NodePlan(many, 9).parcel_limit(), (1u << 20) / (64 * 8));
}

TEST(NodePlan, BlocksOfRootsGoTogetherWhereThatIsFaster) {
  constexpr size_t kRoom = 968;
  const NodePlan two({0, 0, 1, 1}, 0), three({0, 0, 0, 1, 1}, 0), eight({0, 0, 0, 0, 0, 0, 0, 0, 1}, 0);
  EXPECT_FALSE(two.gathers_parcels(969, kRoom));
  EXPECT_FALSE(three.gathers_parcels(968, kRoom));
  EXPECT_TRUE(three.gathers_parcels(969, kRoom));
  EXPECT_TRUE(three.gathers_parcels(16384, kRoom));
  EXPECT_FALSE(three.gathers_parcels(16385, kRoom));
  EXPECT_FALSE(three.scatters_parcels());
  EXPECT_TRUE(eight.scatters_parcels());
}

// Every rank receives once from every other node, from the rank that stands in for it there. Both sides agree on this.
TEST(NodePlan, RanksAgreeOnWhoStandsForWhom) {
  for (const auto& nodes : kPlacements) {
    const int size = static_cast<int>(nodes.size());
    std::vector<NodePlan> plans;
    for (int rank = 0; rank < size; ++rank) plans.emplace_back(nodes, rank);
    for (int rank = 0; rank < size; ++rank) {
      const NodePlan& plan = plans[rank];
      EXPECT_EQ(plan.stands_for(rank, plan.node()), rank);
      EXPECT_LE(static_cast<int>(plan.targets().size()) + 1, plan.most_stood_for());
      for (int node = 0; node < plan.nodes(); ++node) {
        const int stands = plan.stands_for(rank, node);
        EXPECT_EQ(plan.node_of(stands), node);
        if (node == plan.node()) continue;
        EXPECT_TRUE(holds(plan.peers(), stands));
        EXPECT_TRUE(holds(plans[stands].targets(), rank));
      }
      for (const int peer : plan.peers()) EXPECT_TRUE(holds(plans[peer].peers(), rank));
      for (const int target : plan.targets()) EXPECT_TRUE(holds(plan.peers(), target));
    }
  }
}

TEST(NodePlan, PartsCoverEverythingOnce) {
  for (const size_t total : {0u, 1u, 15u, 16u, 17u, 1000u, 65537u}) {
    for (const int parts : {1, 2, 3, 7}) {
      for (const size_t unit : {1u, 16u, 64u}) {
        size_t next = 0;
        for (int i = 0; i < parts; ++i) {
          const ElementRange part = part_of(total, parts, i, unit);
          EXPECT_EQ(part.begin, next);
          if (next + part.count < total) EXPECT_EQ(part.count % unit, 0u);
          EXPECT_LE(part.count, part_of(total, parts, 0, unit).count);
          next += part.count;
        }
        EXPECT_EQ(next, total);
      }
    }
  }
}

}  // namespace
}  // namespace ark
