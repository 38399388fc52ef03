// GPU memory over a pretended NIC and a pretended driver: which path is found and why, messages from and to it,
// registrations of memory that was freed.
#include <cstring>
#include <thread>

#include "cuda/device_memory.hpp"
#include "dma/rdma/gpu_memory.hpp"
#include "support.hpp"
#include "support/pretended_driver.hpp"

namespace ark::rdma_test {
namespace {

using rdma::GpuPath;
using rdma::Where;

class GpuTest : public RdmaTest {
 protected:
  void SetUp() override {
    driver();
    RdmaTest::SetUp();
    pretend_dma_buf(1, 100);
  }
  void TearDown() override {
    pretend_dma_buf(1, 100);
    RdmaTest::TearDown();
  }
};

TEST_F(GpuTest, TheReasonOfAPathIsTold) {
  const auto engine = new_engine();
  const auto why = [&] {
    const GpuPath path = rdma::gpu_path(*engine->device(), 0);
    EXPECT_EQ(path.direct, path.reason.empty());
    return path.reason;
  };
  EXPECT_EQ(why(), "");
  EXPECT_EQ(pretend_counts()->regions, 0);  // the trial's is given back
  pretend_dma_buf(0, 100);
  EXPECT_NE(why().find("exports no dma-buf"), std::string::npos);
  pretend_dma_buf(1, 0);
  EXPECT_NE(why().find("may miss what a NIC has written"), std::string::npos);
  pretend_dma_buf(1, 200);
  EXPECT_EQ(why(), "");
  control().refuse_dma_buf = 1;
  EXPECT_EQ(why(), "pretend0 registers no GPU memory: Operation not supported");
  std::string no_verbs;
  auto old = std::make_shared<rdma::Verbs>(*rdma::Verbs::load(PRETENDED_VERBS, no_verbs));
  old->reg_dmabuf_mr = nullptr;
  const auto path = rdma::gpu_path(*rdma::Device::open(old, pretended_options()), 0);
  EXPECT_FALSE(path.direct);
  EXPECT_NE(path.reason.find("libibverbs has no ibv_reg_dmabuf_mr"), std::string::npos);
}

// Messages and puts of GPU memory at either end, beside memory of the host at the other.
TEST_F(GpuTest, GpuMemoryMeetsMemoryOfEitherKind) {
  constexpr size_t kBytes = (1 << 20) + 12345;
  for (const int rails : {1, 2}) {
    Group group(2, {}, pretended_options(), 1024, rails);
    const uint64_t before = pretend_counts()->dma_bufs;
    for (const bool from_gpu : {true, false}) {
      // Neither begins where its allocation does.
      const auto source = DeviceMemory::allocate(0, kBytes + 100), target = DeviceMemory::allocate(1, kBytes + 300);
      const auto data = pattern(kBytes, static_cast<uint32_t>(rails));
      std::memcpy(source.data() + 100, data.data(), kBytes);
      const auto received = group[1].receive(0, 4, target.data() + 200, kBytes, from_gpu ? Where::host : Where::gpu);
      const auto sent = group[0].send(1, 4, source.data() + 100, kBytes, from_gpu ? Where::gpu : Where::host);
      ASSERT_TRUE(received->wait_until(soon()));
      ASSERT_TRUE(sent->wait_until(soon()));
      EXPECT_EQ(std::memcmp(target.data() + 200, data.data(), kBytes), 0);
      EXPECT_EQ(target.data()[199], 0);
      EXPECT_EQ(target.data()[200 + kBytes], 0);
    }
    EXPECT_GT(pretend_counts()->dma_bufs, before);
  }
}

TEST_F(GpuTest, WhatIsNoGpuMemoryIsTheCallersError) {
  Group group(2);
  std::vector<std::byte> host(2 << 20);
  const auto refusal = [](const std::function<void()>& body) {
    try {
      body();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  EXPECT_NE(
      refusal([&] { group[0].hold(host.data(), host.size(), true, Where::gpu); }).find("no GPU memory at this address"),
      std::string::npos);
  EXPECT_NE(refusal([&] { group[0].send(1, 4, host.data(), 100, Where::gpu); }).find("too small"), std::string::npos);
}

// A region may stay registered while idle, but only as long as its memory is the same allocation.
TEST_F(GpuTest, MemoryThatWasFreedIsRegisteredAnew) {
  rdma::Options options = pretended_options();
  options.cache_mb = 64;
  const auto engine = new_engine(options);
  auto& memory = engine->memory();
  int same = 0;
  for (int turn = 0; turn < 20; ++turn) {
    auto first = DeviceMemory::allocate(0, 4 << 20);
    const char* const at = first.data();
    memory.hold(at, 1 << 20, Where::gpu);
    const auto once = memory.counts();
    memory.hold(at + 1000, 1 << 19, Where::gpu);
    EXPECT_EQ(memory.counts().registered, once.registered);
    EXPECT_EQ(memory.counts().reused, once.reused + 1);
    first = DeviceMemory();
    const auto second = DeviceMemory::allocate(0, 4 << 20);
    if (second.data() != at) continue;
    ++same;
    memory.hold(at, 1 << 20, Where::gpu);
    EXPECT_EQ(memory.counts().registered, once.registered + 1);
    EXPECT_EQ(memory.counts().idle, once.idle);  // the old one is gone
  }
  EXPECT_GT(same, 0);
}

}  // namespace
}  // namespace ark::rdma_test
