// Tests the records in the store: which are accepted or rejected, and what all ranks conclude from all offers.
#include "dma/rdma/endpoint.hpp"

#include <gtest/gtest.h>

namespace ark::rdma_records_test {
namespace {

using rdma::Endpoint;
using rdma::Offer;
using rdma::Wish;

Offer offer(int rank, int size, uint32_t mtu = 4096) {
  Offer one;
  one.rank = static_cast<uint32_t>(rank);
  one.size = static_cast<uint32_t>(size);
  one.usable = one.ethernet = true;
  one.mtu = mtu;
  one.rails = 1;
  one.device = "mlx5_" + std::to_string(rank);
  return one;
}

Offer none(int rank, int size) {
  Offer one;
  one.rank = static_cast<uint32_t>(rank);
  one.size = static_cast<uint32_t>(size);
  one.reason = "libibverbs finds no RDMA device";
  return one;
}

template <class Call>
std::string refusal(Call&& call) {
  try {
    call();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

Endpoint endpoint() {
  Endpoint one;
  one.to = 1;
  one.size = 2;
  one.pair = 0x123456;
  one.first_packet = 0xffffff;
  one.gid[15] = 9;
  one.lid = 7;
  one.key = 0xdeadbeef;
  one.inbox = 0x7f0000000000;
  one.slots = 64;
  one.slot_bytes = 4096;
  return one;
}

TEST(RdmaRecordsTest, RoundTrip) {
  EXPECT_EQ(Endpoint::decode(endpoint().encode()), endpoint());
  EXPECT_EQ(Offer::decode(offer(1, 3).encode()), offer(1, 3));
  EXPECT_EQ(Offer::decode(none(1, 3).encode()), none(1, 3));
}

TEST(RdmaRecordsTest, OutOfRangeIsRejected) {
  const auto rejects = [](auto change, const std::string& why) {
    Endpoint one = endpoint();
    change(one);
    const std::string text = refusal([&] { Endpoint::decode(one.encode()); });
    EXPECT_TRUE(has(text, "RDMA handle record rejected: ") && has(text, why)) << text;
  };
  rejects([](Endpoint& one) { one.pair = 0; }, "queue pair 0");
  rejects([](Endpoint& one) { one.pair = 1 << 24; }, "queue pair 16777216");
  rejects([](Endpoint& one) { one.first_packet = 1 << 24; }, "first packet");
  rejects([](Endpoint& one) { one.from = 2; }, "rank 2 of 2");
  rejects([](Endpoint& one) { one.size = 0; }, "group size 0");
  rejects([](Endpoint& one) { one.lid = 1 << 16; }, "LID");
  rejects([](Endpoint& one) { one.slots = 0; }, "0 slots");
  rejects([](Endpoint& one) { one.slot_bytes = 1 << 21; }, "slots of");
  rejects([](Endpoint& one) { one.inbox = UINT64_MAX - 100; }, "inbox");
  auto bytes = endpoint().encode();
  bytes[4] = 3;
  EXPECT_TRUE(has(refusal([&] { Endpoint::decode(bytes); }), "version is 3, not 2"));
  bytes.pop_back();
  EXPECT_TRUE(has(refusal([&] { Endpoint::decode(bytes); }), "127 bytes where 128 belong"));
  Offer lies = offer(0, 2);
  lies.mtu = 1000;
  EXPECT_TRUE(has(refusal([&] { Offer::decode(lies.encode()); }), "MTU is 1000"));
  lies = offer(0, 2);
  lies.reason = "and yet none";
  EXPECT_FALSE(refusal([&] { Offer::decode(lies.encode()); }).empty());
}

TEST(RdmaDecisionTest, AllMustHaveIt) {
  auto decision = rdma::decide({offer(0, 2), offer(1, 2)}, 0);
  EXPECT_TRUE(decision.rdma);
  EXPECT_EQ(decision.mtu, 4096);
  EXPECT_EQ(decision.reason, "RoCE, MTU 4096");
  decision = rdma::decide({offer(0, 2), none(1, 2)}, 0);
  EXPECT_FALSE(decision.rdma);
  EXPECT_EQ(decision.reason, "rank 1 has no RDMA: libibverbs finds no RDMA device");
  std::vector<Offer> offers{offer(0, 2), offer(1, 2)};
  offers[1].wish = Wish::gloo;
  EXPECT_EQ(rdma::decide(offers, 0).reason, "rank 1 has ARK_NET=gloo");
  offers[1] = offer(1, 2);
  offers[1].ethernet = false;
  EXPECT_EQ(rdma::decide(offers, 0).reason, "rank 0 has RoCE (mlx5_0) and rank 1 has InfiniBand (mlx5_1)");
}

TEST(RdmaDecisionTest, WhereItIsAskedForItIsAnErrorThatNamesTheRank) {
  std::vector<Offer> offers{offer(0, 3), offer(1, 3), none(2, 3)};
  offers[1].wish = Wish::rdma;
  for (int rank = 0; rank < 3; ++rank) {
    const std::string text = refusal([&] { rdma::decide(offers, rank); });
    EXPECT_TRUE(has(text, "rank 1 asks for RDMA between nodes (ARK_NET=rdma), and rank 2 has no RDMA")) << text;
  }
}

TEST(RdmaDecisionTest, MixedMtusTakeTheLeastAndSaySo) {
  const auto decision = rdma::decide({offer(0, 2, 4096), offer(1, 2, 1024)}, 0);
  EXPECT_TRUE(decision.rdma);
  EXPECT_EQ(decision.mtu, 1024);
  EXPECT_EQ(decision.reason, "RoCE, MTU 1024 (the least: rank 1; rank 0 has 4096)");
  std::vector<Offer> offers{offer(0, 2, 4096), offer(1, 2, 1024)};
  offers[0].mtu_asked = offers[1].mtu_asked = 2048;
  EXPECT_TRUE(
      has(refusal([&] { rdma::decide(offers, 0); }),
          "rank 0 asks for an MTU of 2048 bytes (ARK_RDMA_MTU), and the port of rank 1 (mlx5_1) has 1024 bytes"));
  offers[1] = offer(1, 2);
  EXPECT_FALSE(refusal([&] { rdma::decide({offers[1], offers[0]}, 0); }).empty());
  offers[1].mtu_asked = 2048;
  EXPECT_EQ(rdma::decide(offers, 0).mtu, 2048);
}

TEST(RdmaDecisionTest, AsManyRailsAsEveryRankHas) {
  std::vector<Offer> offers{offer(0, 3), offer(1, 3, 2048), offer(2, 3)};
  EXPECT_EQ(rdma::decide(offers, 0).rails, 1);
  for (Offer& one : offers) one.rails = 2;
  EXPECT_EQ(rdma::decide(offers, 0).rails, 2);
  EXPECT_EQ(rdma::decide(offers, 0).reason, "RoCE, MTU 2048 (the least: rank 1; rank 0 has 4096), 2 rails");
  offers[2].rails = 3;
  offers[1].rails = 1;
  EXPECT_EQ(rdma::decide(offers, 2).rails, 1);
  EXPECT_TRUE(has(rdma::decide(offers, 2).reason, ", 1 rails (the least: rank 1; rank 2 has 3)"));
  for (const uint32_t rails : {0u, 9u}) {
    offers[0].rails = rails;
    EXPECT_TRUE(has(refusal([&] { Offer::decode(offers[0].encode()); }), std::to_string(rails) + " rails"));
  }
}

}  // namespace
}  // namespace ark::rdma_records_test
