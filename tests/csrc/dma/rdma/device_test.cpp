// Tests which port and GID are chosen, the errors if there is no suitable one, and memory that stays registered.
#include "dma/rdma/device.hpp"

#include "dma/rdma/registration.hpp"
#include "support.hpp"

namespace ark::rdma_test {
namespace {

using DeviceTest = RdmaTest;

std::string refusal(const rdma::Options& options) {
  std::string why_not;
  const auto verbs = rdma::Verbs::load(PRETENDED_VERBS, why_not);
  try {
    rdma::Device::open(verbs, options);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(DeviceTest, NoLibraryIsAReasonAndNoFailure) {
  std::string why_not;
  EXPECT_EQ(rdma::Verbs::load("/nowhere/libibverbs.so", why_not), nullptr);
  EXPECT_TRUE(has(why_not, "no libibverbs (") && has(why_not, "install")) << why_not;
  jit::LibraryOpener empty;
  empty.open = [](const std::string&, std::string&) { return reinterpret_cast<void*>(1); };
  empty.symbol = [](void*, const char* name) -> void* {
    return std::string(name) == "ibv_reg_mr" ? nullptr : reinterpret_cast<void*>(1);
  };
  EXPECT_EQ(rdma::Verbs::load("", why_not, empty), nullptr);
  EXPECT_TRUE(has(why_not, "has no ibv_reg_mr")) << why_not;
}

TEST_F(DeviceTest, TakesTheFirstActivePortAndRoceV2OverIPv4) {
  auto engine = new_engine();
  EXPECT_EQ(engine->device()->text(), "pretend0 port 1, GID 3 (RoCE v2, IPv4: 10.77.0.1), MTU 4096");
  auto options = pretended_options();
  options.device = "pretend1";
  options.gid_index = 0;
  EXPECT_EQ(new_engine(options)->device()->text(), "pretend1 port 1, GID 0 (RoCE v1, IPv6: fe80::2), MTU 4096");
  control().only_ipv6 = 1;
  EXPECT_EQ(new_engine()->device()->text(), "pretend0 port 1, GID 1 (RoCE v2, IPv6: fe80::1), MTU 4096");
}

TEST_F(DeviceTest, WhatIsNotThereIsNamedWithWhatIs) {
  auto options = pretended_options();
  options.device = "mlx5_9";
  EXPECT_TRUE(
      has(refusal(options), "there is no RDMA device \"mlx5_9\" (ARK_RDMA_DEVICE); there are pretend0, pretend1"))
      << refusal(options);
  options = pretended_options();
  options.gid_index = 6;
  EXPECT_TRUE(has(refusal(options), "GID 6 (ARK_RDMA_GID_INDEX) is empty; there are 0 (RoCE v1, IPv6: fe80::1), 1 ("))
      << refusal(options);
  options = pretended_options();
  options.port = 2;
  EXPECT_TRUE(has(refusal(options), "it has 1 ports, and number 2 is asked for (ARK_RDMA_PORT")) << refusal(options);
  options = pretended_options();
  options.pkey_index = 3;
  EXPECT_TRUE(has(refusal(options), "ARK_RDMA_PKEY_INDEX")) << refusal(options);
  options = pretended_options();
  control().small_mtu = 1;
  options.device = "pretend1";
  options.mtu = 4096;
  EXPECT_TRUE(has(refusal(options), "its MTU is 1024 bytes, and 4096 are asked for (ARK_RDMA_MTU)"))
      << refusal(options);
  control().port_down = 1;
  EXPECT_TRUE(has(refusal(pretended_options()), "pretend0: its port 1 is down: bring its network interface up"))
      << refusal(pretended_options());
  control().no_devices = 1;
  EXPECT_TRUE(has(refusal(pretended_options()), "libibverbs finds no RDMA device")) << refusal(pretended_options());
}

TEST_F(DeviceTest, PortsAreListedWithTheirTrouble) {
  std::string why_not;
  const auto verbs = rdma::Verbs::load(PRETENDED_VERBS, why_not);
  auto ports = rdma::ports_of(*verbs, {});
  ASSERT_EQ(ports.size(), 2u);
  EXPECT_EQ(ports[1].device, "pretend1");
  EXPECT_EQ(ports[1].gid_index, 3);
  EXPECT_EQ(ports[1].trouble, "");
  control().port_down = 1;
  ports = rdma::ports_of(*verbs, {});
  EXPECT_TRUE(has(ports[0].trouble, "down"));
}

TEST_F(DeviceTest, GroupsShareAnEngine) {
  const auto one = Engine::of(pretended_options()), two = Engine::of(pretended_options());
  EXPECT_EQ(one, two);
  auto other = pretended_options();
  other.device = "pretend1";
  EXPECT_NE(Engine::of(other), one);
}

TEST_F(DeviceTest, MemoryIsRegisteredOnceAndHeldWhileItIsUsed) {
  auto engine = new_engine();
  auto& memory = engine->memory();
  std::vector<char> data(1 << 16);
  auto whole = memory.hold(data.data(), data.size());
  auto part = memory.hold(data.data() + 100, 1000);
  EXPECT_EQ(part.local_key(), whole.local_key());
  EXPECT_EQ(memory.counts().registered, 1u);
  whole.reset();
  EXPECT_EQ(memory.counts().held, 1u);
  part.reset();
  EXPECT_EQ(memory.counts().held, 0u);
  EXPECT_EQ(memory.counts().idle, 0u);  // by default nothing is kept
  EXPECT_EQ(pretend_counts()->regions, 0);
}

TEST_F(DeviceTest, WhatStaysRegisteredIsBoundedAndTheOldestGoes) {
  auto options = pretended_options();
  options.cache_mb = 3;
  auto engine = new_engine(options);
  auto& memory = engine->memory();
  std::vector<std::vector<char>> data(5, std::vector<char>(1 << 20));
  for (auto& one : data) memory.hold(one.data(), one.size());
  EXPECT_EQ(memory.counts().idle, 3u);
  EXPECT_EQ(memory.counts().idle_bytes, size_t{3} << 20);
  memory.hold(data[2].data(), 10);  // already registered, and now the most recent
  EXPECT_EQ(memory.counts().reused, 1u);
  memory.hold(data[0].data(), data[0].size());  // the oldest would have been dropped, now number 3 is
  EXPECT_EQ(memory.counts().registered, 6u);
  memory.hold(data[2].data(), 10);
  memory.hold(data[3].data(), data[3].size());
  EXPECT_EQ(memory.counts().registered, 7u);
  // If registration fails, idle memory is dropped before it becomes an error.
  control().most_memory = 4 << 10;
  std::vector<char> large(3 << 20);
  auto held = memory.hold(large.data(), large.size());
  EXPECT_EQ(memory.counts().held, 1u);
  std::vector<char> more(2 << 20);
  EXPECT_THROW(memory.hold(more.data(), more.size()), Error);
}

}  // namespace
}  // namespace ark::rdma_test
