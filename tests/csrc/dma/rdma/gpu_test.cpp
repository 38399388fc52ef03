// GPU memory over a pretended NIC and a pretended driver: which path is found and why, messages by either path at each
// end, registrations of memory that was freed.
#include <cstring>
#include <thread>

#include "cuda/device_memory.hpp"
#include "dma/rdma/gpu_transfers.hpp"
#include "support.hpp"
#include "support/pretended_driver.hpp"

namespace ark::rdma_test {
namespace {

using rdma::GpuPath;
using rdma::GpuTransfers;
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

struct Ends {
  bool sender_direct, receiver_direct;
  int rails;
};

class GpuPaths : public GpuTest, public ::testing::WithParamInterface<Ends> {};

TEST_P(GpuPaths, MessagesOfEverySizeArrive) {
  const Ends ends = GetParam();
  Group group(2, {}, pretended_options(), 1024, ends.rails);
  const auto path_of = [](bool direct) { return direct ? GpuPath{true, ""} : GpuPath{false, "a test wants it so"}; };
  const uint64_t before = pretend_counts()->dma_bufs;
  {
    const GpuTransfers::Setup setup{.gpu = 0, .chunk_bytes = 512 << 10, .chunks = 3};
    GpuTransfers sender(group.ranks[0], setup, path_of(ends.sender_direct));
    GpuTransfers receiver(group.ranks[1], setup, path_of(ends.receiver_direct));
    const size_t small = group[0].most_small();
    for (const size_t bytes : {size_t{1}, small, small + 1, (size_t{512} << 10) - 1, (size_t{512} << 10) + 1,
                               (size_t{512} << 10) + small + 1, (size_t{9} << 20) + 12345}) {
      // Neither begins where its allocation does.
      const auto source = DeviceMemory::allocate(0, bytes + 100), target = DeviceMemory::allocate(1, bytes + 300);
      const auto data = pattern(bytes, static_cast<uint32_t>(bytes));
      std::memcpy(source.data() + 100, data.data(), bytes);
      std::thread there([&] { receiver.receive(0, 4, target.data() + 200, bytes, soon()); });
      sender.send(1, 4, source.data() + 100, bytes, soon());
      there.join();
      EXPECT_EQ(std::memcmp(target.data() + 200, data.data(), bytes), 0) << bytes;
      EXPECT_EQ(target.data()[199], 0);
      EXPECT_EQ(target.data()[200 + bytes], 0);
    }
  }
  // What is small goes by the host at both ends.
  EXPECT_EQ(pretend_counts()->dma_bufs > before, ends.sender_direct || ends.receiver_direct);
}
INSTANTIATE_TEST_SUITE_P(Of, GpuPaths,
                         ::testing::Values(Ends{true, true, 1}, Ends{true, false, 1}, Ends{false, true, 1},
                                           Ends{false, false, 1}, Ends{true, true, 2}, Ends{false, true, 2}));

// Both ways at once, from several threads.
TEST_F(GpuTest, TransfersRunSideBySide) {
  constexpr int kThreads = 3;
  constexpr size_t kBytes = (3 << 20) + 77;
  Group group(2);
  const GpuTransfers::Setup setup{.gpu = 0, .chunk_bytes = 256 << 10, .chunks = 2};
  std::unique_ptr<GpuTransfers> ends[2];
  for (int r = 0; r < 2; ++r)
    ends[r] = std::make_unique<GpuTransfers>(group.ranks[r], setup, GpuPath{r == 0, r == 0 ? "" : "staged"});
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    for (int n = 0; n < kThreads; ++n) {
      threads.emplace_back([&, r, n] {
        const auto memory = DeviceMemory::allocate(0, kBytes);
        const auto data = pattern(kBytes, 10 * r + n);
        std::memcpy(memory.data(), data.data(), kBytes);
        ends[r]->send(1 - r, n, memory.data(), kBytes, soon());
      });
      threads.emplace_back([&, r, n] {
        const auto memory = DeviceMemory::allocate(0, kBytes);
        ends[r]->receive(1 - r, n, memory.data(), kBytes, soon());
        EXPECT_EQ(std::memcmp(memory.data(), pattern(kBytes, 10 * (1 - r) + n).data(), kBytes), 0);
      });
    }
  }
  for (auto& thread : threads) thread.join();
  for (auto& end : ends) end.reset();
}

TEST_F(GpuTest, AReceiverThatDoesNotComeIsNamedAtTheDeadline) {
  for (const bool direct : {true, false}) {
    Group group(2);
    GpuTransfers sender(group.ranks[0], {}, {direct, direct ? "" : "staged"});
    const auto memory = DeviceMemory::allocate(0, 4 << 20);
    try {
      sender.send(1, 4, memory.data(), 4 << 20, Clock::now() + std::chrono::milliseconds(20));
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::timeout);
      EXPECT_EQ(error.context().peer, 1);
    }
  }
}

TEST_F(GpuTest, WhatIsNoGpuMemoryIsTheCallersError) {
  Group group(2);
  GpuTransfers sender(group.ranks[0], {}, {true, ""});
  std::vector<std::byte> host(2 << 20);
  const auto refusal = [](const std::function<void()>& body) {
    try {
      body();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  EXPECT_NE(refusal([&] { sender.send(1, 4, host.data(), host.size(), soon()); }).find("no GPU memory at this address"),
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
