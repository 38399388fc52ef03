// A window's requests over a pretended NIC: what they write and count, requests that name what is not there, a peer
// that has left.
#include "dma/rdma/gpu_window.hpp"

#include <cstring>

#include "support.hpp"
#include "support/pretended_driver.hpp"

namespace ark::rdma_test {
namespace {

using protocol::Request;
using rdma::GpuPath;
using rdma::GpuWindow;

constexpr GpuWindow::Shape kShape{.lanes = 2, .slots = 4, .chunk_bytes = 4096};

class GpuWindowTest : public RdmaTest {
 protected:
  void SetUp() override {
    driver();
    RdmaTest::SetUp();
    pretend_dma_buf(1, 100);
    open();
  }
  void TearDown() override {
    close();
    RdmaTest::TearDown();
  }

  void open() {
    group_ = std::make_unique<Group>(2);
    for (int r = 0; r < 2; ++r) {
      GpuWindow::Setup setup;
      setup.path = r == 0 ? GpuPath{true, ""} : GpuPath{false, "a test wants it so"};
      setup.shape = kShape;
      setup.ranks = {0, 1};
      setup.node = r;
      setup.number = 100;
      setup.fail = [this, r](const Error& error) {
        const std::lock_guard lock(mutex_);
        failures_[r].push_back(error.what());
      };
      windows_[r] = std::make_unique<GpuWindow>(group_->ranks[r], setup);
    }
    const std::vector<GpuWindow::Remote> remotes{windows_[0]->own(), windows_[1]->own()};
    for (auto& window : windows_) window->connect(remotes);
  }
  void close() {
    for (auto& window : windows_) window.reset();
    group_.reset();
  }

  // As a kernel's thread.
  void post(int rank, uint32_t lane, const Request& request) {
    const device::BetweenWindow view = windows_[rank]->kernels_view();
    protocol::post(view.rings[lane], view.state[lane].head++, request);
  }
  static void await(const protocol::uint64& count, uint64_t least) {
    test::wait_until("a count", [&] { return protocol::load_acquire(count) >= least; });
  }
  std::vector<std::string> failures(int rank) {
    const std::lock_guard lock(mutex_);
    return failures_[rank];
  }

  std::unique_ptr<Group> group_;
  std::unique_ptr<GpuWindow> windows_[2];
  std::mutex mutex_;
  std::vector<std::string> failures_[2];
};

TEST_F(GpuWindowTest, AWriteIsCountedBehindItsBytes) {
  const device::BetweenWindow from = windows_[0]->kernels_view(), to = windows_[1]->kernels_view();
  const uint64_t outbox = device::between_outbox(from);
  EXPECT_EQ(device::between_bytes(from), windows_[0]->bytes());
  for (uint64_t n = 0; n < 20; ++n) {
    const auto data = pattern(1000, static_cast<uint32_t>(n));
    const uint64_t slot = n % kShape.slots * kShape.chunk_bytes;
    std::memcpy(from.memory + outbox + slot, data.data(), data.size());
    post(0, 1, {Request::put_with_signal, 1, slot, outbox + slot, data.size()});
    await(to.heard[1 * 2 + 0].chunks, n + 1);  // of lane 1, from node 0
    EXPECT_EQ(std::memcmp(to.memory + slot, data.data(), data.size()), 0) << n;
    post(1, 1, {Request::signal, 0, 0, 0, 0});
    await(from.heard[1 * 2 + 1].credits, n + 1);
  }
  EXPECT_EQ(protocol::load_acquire(to.heard[0].chunks), 0u) << "lanes have counts of their own";
  EXPECT_TRUE(failures(0).empty());
  EXPECT_TRUE(failures(1).empty());
}

struct Wrong {
  const char* what;
  Request request;
};

TEST_F(GpuWindowTest, ARequestForWhatIsNotThereEndsTheWindow) {
  const uint64_t half = windows_[0]->bytes() / 2, chunk = kShape.chunk_bytes;
  const Wrong wrong[] = {
      {"to itself", {Request::put_with_signal, 0, 0, half, 16}},
      {"to no node", {Request::put_with_signal, 2, 0, half, 16}},
      {"too much", {Request::put_with_signal, 1, 0, half, chunk + 1}},
      {"nothing", {Request::put_with_signal, 1, 0, half, 0}},
      {"from the inbox", {Request::put_with_signal, 1, 0, half - 16, 16}},
      {"to the outbox", {Request::put_with_signal, 1, half - 8, half, 16}},
      {"from beyond", {Request::put_with_signal, 1, 0, 2 * half - 8, 16}},
      {"an unknown kind", {static_cast<Request::Kind>(7), 1, 0, half, 16}},
  };
  for (const Wrong& one : wrong) {
    post(0, 0, one.request);
    test::wait_until(one.what, [&] { return failures(0).size() == 1; });
    EXPECT_NE(failures(0)[0].find("a kernel asked the NIC for"), std::string::npos) << failures(0)[0];
    close();
    failures_[0].clear();
    open();
  }
}

TEST_F(GpuWindowTest, CreditsAndProbesForAPeerThatHasLeftAreNoFailure) {
  windows_[1].reset();
  (*group_)[1].close(std::chrono::seconds(5));
  test::wait_until("the goodbye", [&] {
    post(0, 0, {Request::signal, 1, 0, 0, 0});
    post(0, 0, {Request::probe, 1, 0, 0, 0});
    return windows_[0]->requests() > 20;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // pauses look at what was posted
  EXPECT_TRUE(failures(0).empty());
  post(0, 0, {Request::put_with_signal, 1, 0, windows_[0]->bytes() / 2, 16});
  test::wait_until("the failure of a write", [&] { return !failures(0).empty(); });
}

}  // namespace
}  // namespace ark::rdma_test
