// A group over several nodes on a pretended NIC: the CPU plays the kernels between nodes, requests go through real
// rings, and shared memory of the CPU stands for the GPUs of a node.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "collectives/cpu/ranks.hpp"
#include "collectives/cuda/between/nodes_communicator.hpp"
#include "dma/rdma/support.hpp"
#include "support/between_player.hpp"
#include "support/pretended_driver.hpp"

namespace ark::rdma_test {

using rdma::GpuWindow;

struct Form {
  int nodes, places;
  int direct;  // this many of the first ranks have GPU memory that the NIC reaches
  int rails = 1;
  bool interleaved = false;  // the nodes get a rank each in turn, while they have room; else node after node
  std::vector<int> uneven;   // ranks of each node; empty: `places`

  // For example {2, 3}.
  static Form of(std::vector<int> ranks, int direct, bool interleaved = false, int rails = 1) {
    const int nodes = static_cast<int>(ranks.size()), most = *std::ranges::max_element(ranks);
    return {nodes, most, direct, rails, interleaved, std::move(ranks)};
  }
  int on(int node) const { return uneven.empty() ? places : uneven[node]; }
  int size() const {
    int all = 0;
    for (int node = 0; node < nodes; ++node) all += on(node);
    return all;
  }
  // By rank.
  std::vector<int> placement() const {
    std::vector<int> where;
    if (!interleaved)
      for (int node = 0; node < nodes; ++node) where.insert(where.end(), on(node), node);
    for (int place = 0; place < places && interleaved; ++place)
      for (int node = 0; node < nodes; ++node)
        if (place < on(node)) where.push_back(node);
    return where;
  }
};
inline void PrintTo(const Form& form, std::ostream* out) {
  *out << "nodes of";
  for (int node = 0; node < form.nodes; ++node) *out << (node > 0 ? " + " : " ") << form.on(node);
  *out << (form.interleaved ? ", interleaved" : "");
}

// The ranks of a group as threads.
class World {
 public:
  struct Rank {
    std::unique_ptr<NodesCommunicator> group;
    device::GroupStatus status{};
    std::vector<Error> failures;  // of requests
  };
  using Body = std::function<void(Communicator& group, Rank& rank, int number)>;

  explicit World(Form form, std::chrono::milliseconds limit = std::chrono::seconds(30))
      : form_(form), limit_(limit), group_(form.size(), {}, pretended_options(), 1024, form.rails) {}

  int size() const { return static_cast<int>(placement_.size()); }
  int node_of(int rank) const { return placement_[rank]; }
  Messages& messages(int rank) { return group_[rank]; }

  Operation operation(Kind kind, DType dtype, size_t count, ReduceOp op = ReduceOp::sum, int root = -1) const {
    return test::operation(kind, 1, dtype, count, op, root, limit_);
  }

  // What each rank threw.
  std::vector<std::string> run(const Body& body) {
    std::vector<std::string> thrown(size());
    std::vector<test::Job> jobs;
    for (int node = 0; node < form_.nodes; ++node) jobs.push_back(test::make_job(form_.on(node)));
    std::vector<std::thread> threads;
    for (int number = 0; number < size(); ++number)
      threads.emplace_back([&, number] {
        try {
          run_one(number, jobs[node_of(number)], body);
        } catch (const Error& error) {
          thrown[number] = error.what();
        }
      });
    for (auto& thread : threads) thread.join();
    return thrown;
  }

 private:
  void run_one(int number, test::Job& job, const Body& body) {
    const NodePlan plan(placement_, number);
    const int places = static_cast<int>(plan.own().size());
    const auto node = std::make_shared<ShmCommunicator>(plan.local(), places, std::move(job.ranks[plan.local()]),
                                                        test::default_options());
    Rank rank;
    std::mutex mutex;
    BetweenStage::Setup setup;
    setup.rank = number, setup.size = size();
    setup.messages = group_.ranks[number];
    setup.status = &rank.status;
    setup.scratch_bytes = scratch_bytes;
    setup.prefix = "stage", setup.timeout = std::chrono::seconds(20);
    setup.store = std::make_shared<StoreOf>(group_.store);
    setup.shape = shape;
    setup.fail = [&](const Error& error) {
      const std::lock_guard lock(mutex);
      rank.failures.push_back(error);
      protocol::store_release(rank.status.abort, protocol::uint32{1});
    };
    setup.launch = [&](const Operation&, const device::BetweenParams& params, device::BetweenForm form,
                       uint32_t blocks) {
      EXPECT_LE(blocks, params.window.lanes);
      if (test::play_between(params, form)) return;
      const int peer = rank.status.peer;
      throw Error(ErrorKind::timeout, device::is_outside(peer)
                                          ? "waited for rank " + std::to_string(device::outside_rank(peer))
                                          : "told to leave");
    };
    setup.refused = refused(number);
    setup.sums = sums(number);
    StoreOf store(group_.store);
    if (number >= form_.direct) setup.path = rdma::GpuPath{false, "a test wants it so"};
    std::string why;
    auto stage = BetweenStage::open(std::move(setup), plan, store, why);
    if (!stage) throw Error(ErrorKind::system, why);
    EXPECT_EQ(stage->bytes() > 0, plan.has_rail());
    if (plan.has_rail()) {
      EXPECT_EQ(stage->path().direct, number < form_.direct) << stage->path().reason;
    }
    rank.group = std::make_unique<NodesCommunicator>(number, size(), plan, node, std::move(stage));
    try {
      body(*rank.group, rank, number);
    } catch (...) {
      finish(*node, rank);
      throw;
    }
    finish(*node, rank);
  }
  static void finish(ShmCommunicator& node, Rank& rank) {
    rank.group.reset();
    node.health().say_goodbye();
    node.point_to_point().stop();
  }
  std::string refused(int rank) const { return rank == refusing ? "a test wants it so" : ""; }

  const Form form_;
  const std::vector<int> placement_ = form_.placement();
  const std::chrono::milliseconds limit_;
  Group group_;

 public:
  int refusing = -1;
  // Small, so that little data takes every slot several times; empty: as on devices.
  std::optional<GpuWindow::Shape> shape = GpuWindow::Shape{.lanes = 3, .slots = 4, .chunk_bytes = 8 << 10};
  size_t scratch_bytes = 128 << 10;
  std::function<SumOrder(int rank)> sums = [](int) { return SumOrder{}; };
};

class NodesTest : public RdmaTest {
 protected:
  void SetUp() override {
    driver();
    test::run_ranks(2, [](ShmCommunicator&, int) {});  // threads of the process have descriptors, once
    RdmaTest::SetUp();
    pretend_dma_buf(1, 100);
  }
};

inline void expect_quiet(const std::vector<std::string>& thrown) {
  for (size_t rank = 0; rank < thrown.size(); ++rank) EXPECT_EQ(thrown[rank], "") << "rank " << rank;
}

}  // namespace ark::rdma_test
