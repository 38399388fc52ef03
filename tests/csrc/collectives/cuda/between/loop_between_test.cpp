// Loop kernels' sums over several nodes on a pretended NIC (nodes_world.hpp), with threads as blocks: several workers a
// rank, cut differently on every rank, and many steps that only each rank's own launches separate. They have the bits
// of collectives of their own, which nodes_sums_test.cpp compares with the CPU's.
#include "cuda/loop/between.cuh"

#include <array>
#include <barrier>
#include <cstring>
#include <random>

#include "collectives/cpu/staged_reduce.hpp"
#include "collectives/cuda/between/nodes_world.hpp"
#include "support/night.hpp"

namespace ark::rdma_test {
namespace {

constexpr uint64_t kChunk = 1024, kMessage = 2 * kChunk;

struct Part {
  DType type;
  ReduceOp op;
  size_t count;
  bool in_place = false;
  size_t bytes() const { return count * size_of(type); }
  size_t chunks() const { return (bytes() + kChunk - 1) / kChunk; }
};

std::vector<uint8_t> input_of(int rank, int step, size_t number, size_t bytes) {
  std::mt19937 random(static_cast<uint32_t>(rank * 1000 + step * 10) + static_cast<uint32_t>(number));
  std::vector<uint8_t> all(bytes);
  for (size_t i = 0; i < bytes; i += 4) {
    const uint32_t word = static_cast<uint32_t>(random()) & 0xbfbfbfbf;  // of moderate exponents and both signs
    std::memcpy(all.data() + i, &word, std::min<size_t>(4, bytes - i));
  }
  return all;
}

// What a plan gives a region's collectives, and the memory that the ranks of its nodes share.
class Region {
 public:
  // turns: all share two places, and each waits for the end of the one before it.
  Region(const World& world, Form form, std::vector<Part> parts, bool turns = false)
      : world_(world), form_(form), parts_(std::move(parts)), turns_(turns) {
    for (const Part& one : parts_) {
      lanes_ = std::max(lanes_, one.chunks());
      place_ = std::max(place_, form.places * protocol::packet_bytes(one.bytes()));
    }
    places_ = turns ? 2 : parts_.size();
    for (int rank = 0; rank < world.size(); ++rank) packets_.emplace_back(2 * places_ * place_ / 16);
  }

  GpuWindow::Shape shape() const {
    return {.lanes = static_cast<uint32_t>(places_ * lanes_), .slots = loop::kSlotsOfLane, .chunk_bytes = kMessage};
  }

  // Runs the steps of a rank, then `after` while it has its window. Returns whether the steps ended.
  bool run(
      NodesCommunicator& group, World::Rank& rank, int me, int steps, std::chrono::nanoseconds limit,
      const std::function<void()>& after = [] {}) {
    std::string why;
    const auto window = group.stage().region_window(shape(), 7, nullptr, why);
    if (!window) throw Error(ErrorKind::system, why);
    const device::BetweenWindow view = window->kernels_view();
    const int workers = 1 + me % 3;
    std::vector<std::vector<uint8_t>> in(parts_.size()), out(parts_.size());
    std::barrier launches(workers);
    std::atomic<bool> left{false};
    std::vector<int> members;
    for (int r = 0; r < world_.size(); ++r)
      if (world_.node_of(r) == world_.node_of(me)) members.push_back(r);
    std::array<char*, loop::kMostRanks> packets{};
    for (size_t i = 0; i < members.size(); ++i) packets[i] = reinterpret_cast<char*>(packets_[members[i]].data());

    const auto work = [&](int worker) {
      test::LoopThread block(&rank.status, limit);
      for (int step = 1; step <= steps && !left; ++step) {
        for (size_t k = 0; worker == 0 && k < parts_.size(); ++k) {
          in[k] = input_of(me, step, k, parts_[k].bytes());
          out[k].assign(parts_[k].bytes(), 0);
        }
        launches.arrive_and_wait();
        for (size_t k = 0; k < parts_.size(); ++k) {
          const int tiles = std::min(workers, static_cast<int>(parts_[k].chunks()));
          const int tile = (worker + static_cast<int>(k)) % workers;
          if (tile < tiles && !left) {
            const uint64_t begin = parts_[k].chunks() * tile / tiles * kChunk,
                           end = std::min(parts_[k].bytes(), parts_[k].chunks() * (tile + 1) / tiles * kChunk);
            const size_t place = turns_ ? k % 2 : k;
            const loop::Exchanged with{packets.data(), (place + step % 2 * places_) * place_, group.place(),
                                       static_cast<uint64_t>(step) << 32 | (k + 1)};
            const loop::Outside outside{view, window->setup().ranks.data(), static_cast<uint32_t>(place * lanes_),
                                        kChunk};
            void* const to = parts_[k].in_place ? in[k].data() : out[k].data();
            if (!add(block, with, outside, parts_[k], in[k].data(), to, begin, end)) left = true;
          }
          if (turns_) launches.arrive_and_wait();
        }
        launches.arrive_and_wait();
        for (size_t k = 0; worker == 0 && !left && k < parts_.size(); ++k)
          check(step, k, parts_[k].in_place ? in[k] : out[k]);
      }
    };
    std::vector<std::thread> others;
    for (int worker = 1; worker < workers; ++worker) others.emplace_back(work, worker);
    work(0);
    for (std::thread& one : others) one.join();
    after();
    return !left;
  }

 private:
  bool add(test::LoopThread& block, const loop::Exchanged& with, const loop::Outside& outside, const Part& part,
           const void* in, void* out, uint64_t begin, uint64_t end) const {
    const auto of_places = [&](auto type, auto op) {
      const auto go = [&](auto places) {
        using Sum = loop::NodesSum<type(), op(), places(), test::LoopThread>;
        return Sum(block, with, outside, in, out, part.bytes()).run(begin, end);
      };
      return form_.places == 1 ? go(is<1>) : form_.places == 2 ? go(is<2>) : go(is<5>);
    };
    const auto of_op = [&](auto type) {
      return part.op == ReduceOp::avg ? of_places(type, is<device::ReduceOp::avg>)
                                      : of_places(type, is<device::ReduceOp::sum>);
    };
    return part.type == DType::f32    ? of_op(is<device::DType::f32>)
           : part.type == DType::bf16 ? of_op(is<device::DType::bf16>)
                                      : of_op(is<device::DType::f16>);
  }
  template <auto kValue>
  static constexpr auto is = [] { return kValue; };

  // Each node's ranks in their order, then the nodes.
  void check(int step, size_t k, const std::vector<uint8_t>& found) const {
    const Part& part = parts_[k];
    const StagedReduce reduction(part.type, part.op, world_.size(), false, true);
    std::vector<std::vector<uint8_t>> inputs, partials;
    std::vector<const void*> wholes;
    for (int r = 0; r < world_.size(); ++r) inputs.push_back(input_of(r, step, k, part.bytes()));
    for (int node = 0; node < form_.nodes; ++node) {
      std::vector<const void*> sources;
      for (int r = 0; r < world_.size(); ++r)
        if (world_.node_of(r) == node) sources.push_back(inputs[r].data());
      partials.emplace_back(part.count * reduction.partial_size());
      reduction.partial(partials.back().data(), sources.data(), static_cast<int>(sources.size()), part.count, nullptr);
    }
    for (const auto& partial : partials) wholes.push_back(partial.data());
    std::vector<uint8_t> wanted(part.bytes());
    reduction.combine(wanted.data(), wholes.data(), form_.nodes, part.count, nullptr);
    EXPECT_EQ(found, wanted) << "step " << step << ", collective " << k;
  }

  const World& world_;
  const Form form_;
  const std::vector<Part> parts_;
  const bool turns_;
  size_t lanes_ = 0, place_ = 0, places_ = 0;
  std::vector<std::vector<std::array<uint64_t, 2>>> packets_;  // by rank
};

constexpr auto kLong = std::chrono::seconds(30);

class LoopBetween : public NodesTest, public ::testing::WithParamInterface<Form> {};

std::vector<Part> some_parts() {
  return {{DType::f32, ReduceOp::sum, 1000},
          {DType::bf16, ReduceOp::sum, 1301, true},
          {DType::f16, ReduceOp::avg, 512},
          {DType::f32, ReduceOp::avg, 3},
          {DType::bf16, ReduceOp::sum, 2048}};
}

TEST_P(LoopBetween, ManySteps) {
  for (const bool turns : {false, true}) {
    World world(GetParam());
    Region region(world, GetParam(), some_parts(), turns);
    expect_quiet(world.run([&](Communicator& group, World::Rank& rank, int me) {
      EXPECT_TRUE(
          region.run(static_cast<NodesCommunicator&>(group), rank, me, test::cases(40 / GetParam().places), kLong));
      EXPECT_TRUE(rank.failures.empty());
    }));
  }
}

INSTANTIATE_TEST_SUITE_P(Nodes, LoopBetween,
                         ::testing::Values(Form{2, 1, 1}, Form{2, 2, 2}, Form{3, 2, 0, 1, true}, Form{2, 1, 2, 2}));
INSTANTIATE_TEST_SUITE_P(Night, LoopBetween, ::testing::Values(Form{4, 1, 4}, Form{2, 5, 3}));

// Beside the group's own collectives, which have other lanes, and after another region.
TEST_F(NodesTest, RegionsAndCollectivesHaveLanesOfTheirOwn) {
  const Form form{2, 1, 1};
  World world(form);
  Region first(world, form, {{DType::f32, ReduceOp::sum, 700}}), second(world, form, some_parts());
  expect_quiet(world.run([&](Communicator& group, World::Rank& rank, int me) {
    auto& nodes = static_cast<NodesCommunicator&>(group);
    for (int time = 0; time < 3; ++time) {
      EXPECT_TRUE(first.run(nodes, rank, me, 5, kLong));
      std::vector<float> data(5000, static_cast<float>(me + 1));
      group.all_reduce(world.operation(Kind::all_reduce, DType::f32, data.size()), data.data(), data.data(),
                       data.size());
      EXPECT_EQ(data, std::vector<float>(5000, 3));
      EXPECT_TRUE(second.run(nodes, rank, me, 5, kLong));
    }
  }));
}

TEST_F(NodesTest, RegionsOfOtherSizesAreAMismatchEverywhere) {
  World world({2, 1, 1});
  const auto thrown = world.run([&](Communicator& group, World::Rank&, int me) {
    std::string why;
    static_cast<NodesCommunicator&>(group).stage().region_window({.lanes = 1, .slots = 2, .chunk_bytes = 1024},
                                                                 static_cast<uint64_t>(me) << 40, nullptr, why);
  });
  for (int me = 0; me < 2; ++me)
    EXPECT_NE(thrown[me].find("rank " + std::to_string(1 - me) + " compiled a region with other collectives"),
              std::string::npos)
        << thrown[me];
}

TEST_F(NodesTest, WhatEndsTheMeetingOnOneRankEndsItOnAll) {
  World world({2, 1, 1});
  const auto thrown = world.run([&](Communicator& group, World::Rank&, int me) {
    std::string why;
    const auto failed =
        me == 1 ? std::make_exception_ptr(Error(ErrorKind::mismatch, "a test wants it so")) : std::exception_ptr();
    static_cast<NodesCommunicator&>(group).stage().region_window({.lanes = 1, .slots = 2, .chunk_bytes = 1024}, 1,
                                                                 failed, why);
  });
  EXPECT_NE(thrown[0].find("rank 1: a test wants it so"), std::string::npos) << thrown[0];
  EXPECT_EQ(thrown[1].find("rank 1"), std::string::npos) << thrown[1];
  EXPECT_NE(thrown[1].find("a test wants it so"), std::string::npos) << thrown[1];
}

TEST_F(NodesTest, OneWithoutAWindowIsNamedToAll) {
  World world({3, 1, 1});
  expect_quiet(world.run([&](Communicator& group, World::Rank&, int me) {
    std::string why = me == 2 ? "a test wants it so" : "";
    auto& stage = static_cast<NodesCommunicator&>(group).stage();
    EXPECT_FALSE(stage.region_window({.lanes = 1, .slots = 2, .chunk_bytes = 1024}, 1, nullptr, why));
    EXPECT_EQ(why, "rank 2: a test wants it so");
  }));
}

TEST_F(NodesTest, ATaskThatWaitsForARankThatDoesNotComeNamesIt) {
  const Form form{2, 1, 0};
  World world(form);
  Region region(world, form, {{DType::f32, ReduceOp::sum, 700}});
  expect_quiet(world.run([&](Communicator& group, World::Rank& rank, int me) {
    const auto stay = [&] {
      if (me == 1) std::this_thread::sleep_for(std::chrono::milliseconds(600));
    };
    const bool done = region.run(static_cast<NodesCommunicator&>(group), rank, me, me == 0 ? 2 : 1,
                                 std::chrono::milliseconds(300), stay);
    EXPECT_EQ(done, me == 1);
    EXPECT_EQ(device::outside_rank(rank.status.peer), me == 0 ? 1 : -1);
  }));
}

// A rank that has sent all it has learns of a lost peer by its probes.
TEST_F(NodesTest, ATasksProbesFindALinkThatIsGone) {
  const Form form{2, 1, 1};
  World world(form);
  Region region(world, form, {{DType::f32, ReduceOp::sum, 700}});
  std::atomic<int> ready{0};
  expect_quiet(world.run([&](Communicator& group, World::Rank& rank, int me) {
    auto& nodes = static_cast<NodesCommunicator&>(group);
    const auto began = Clock::now();
    if (me == 1) {
      const auto stay = [&] { test::wait_until("what rank 0 finds", [&] { return ready == 1; }); };
      EXPECT_TRUE(region.run(nodes, rank, me, 1, std::chrono::seconds(20), stay));
      return;
    }
    std::thread breaking([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));  // all requests but probes have been carried out
      control().link_down = 1;
    });
    EXPECT_FALSE(region.run(nodes, rank, me, 2, std::chrono::seconds(20)));
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(15));
    EXPECT_FALSE(rank.failures.empty());
    for (const Error& error : rank.failures) EXPECT_EQ(error.context().peer, 1) << error.what();
    breaking.join();
    control().link_down = 0;
    ready = 1;
  }));
}

}  // namespace
}  // namespace ark::rdma_test
