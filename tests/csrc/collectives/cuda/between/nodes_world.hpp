// A group over several nodes on a pretended NIC: the CPU plays the kernels between nodes, requests go through real
// rings, and shared memory of the CPU stands for the GPUs of a node.
#pragma once

#include <memory>
#include <mutex>
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
  bool interleaved = false;  // rank r is on node r % nodes; else node after node
};

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
      : form_(form), limit_(limit), group_(form.nodes * form.places, {}, pretended_options(), 1024, form.rails) {}

  int size() const { return form_.nodes * form_.places; }
  int node_of(int rank) const { return form_.interleaved ? rank % form_.nodes : rank / form_.places; }
  Messages& messages(int rank) { return group_[rank]; }

  Operation operation(Kind kind, DType dtype, size_t count, ReduceOp op = ReduceOp::sum, int root = -1) const {
    return test::operation(kind, 1, dtype, count, op, root, limit_);
  }

  // What each rank threw.
  std::vector<std::string> run(const Body& body) {
    std::vector<std::string> thrown(size());
    std::vector<test::Job> jobs;
    for (int node = 0; node < form_.nodes; ++node) jobs.push_back(test::make_job(form_.places));
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
    std::vector<int> nodes(size());
    for (int r = 0; r < size(); ++r) nodes[r] = node_of(r);
    const NodePlan plan(nodes, number);
    const auto node = std::make_shared<ShmCommunicator>(plan.local(), form_.places, std::move(job.ranks[plan.local()]),
                                                        test::default_options());
    Rank rank;
    std::mutex mutex;
    BetweenStage::Setup setup;
    setup.rank = number, setup.size = size();
    setup.messages = group_.ranks[number];
    setup.status = &rank.status;
    setup.scratch_bytes = 128 << 10;
    setup.prefix = "stage", setup.timeout = std::chrono::seconds(20);
    setup.store = std::make_shared<StoreOf>(group_.store);
    setup.shape = GpuWindow::Shape{.lanes = 3, .slots = 4, .chunk_bytes = 8 << 10};
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
    EXPECT_EQ(stage->path().direct, number < form_.direct) << stage->path().reason;
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
  const std::chrono::milliseconds limit_;
  Group group_;

 public:
  int refusing = -1;
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
