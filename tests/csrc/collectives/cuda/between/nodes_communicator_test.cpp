// Collectives over several nodes on a pretended NIC (nodes_world.hpp).
#include <atomic>
#include <cstring>
#include <numeric>
#include <span>

#include "collectives/cuda/between/nodes_world.hpp"
#include "support/night.hpp"

namespace ark::rdma_test {
namespace {

float value(int rank, size_t i) {
  return static_cast<float>((rank + 1) * static_cast<int>(i % 13 + 1));
}

std::vector<float> values(int rank, size_t count, size_t from = 0) {
  std::vector<float> all(count);
  for (size_t i = 0; i < count; ++i) all[i] = value(rank, from + i);
  return all;
}

std::vector<float> sums(int size, size_t count, size_t from = 0, float by = 1) {
  std::vector<float> all(count);
  const int ranks = size * (size + 1) / 2;
  for (size_t i = 0; i < count; ++i) all[i] = static_cast<float>(ranks * static_cast<int>((from + i) % 13 + 1)) / by;
  return all;
}

class NodesForms : public NodesTest, public ::testing::WithParamInterface<Form> {};

// From a word to what takes every slot several times and, for slices, more than the scratch memory.
const std::vector<size_t> kCounts{1, 5000, 40001, 77, 300007};

TEST_P(NodesForms, EveryCollectiveOfEverySize) {
  World world(GetParam());
  const int size = world.size();
  const auto thrown = world.run([&](Communicator& group, World::Rank&, int me) {
    for (const size_t count : std::span(kCounts).first(2 + test::cases(3))) {
      const auto what = [&](Kind kind, ReduceOp op = ReduceOp::sum, int root = -1) {
        return world.operation(kind, DType::f32, count, op, root);
      };
      for (const bool in_place : {true, false}) {
        auto in = values(me, count);
        std::vector<float> out(count);
        group.all_reduce(what(Kind::all_reduce), in.data(), in_place ? in.data() : out.data(), count);
        EXPECT_EQ(in_place ? in : out, sums(size, count)) << count;
        if (!in_place) {
          EXPECT_EQ(in, values(me, count));
        }
      }
      {
        auto in = values(me, count);
        group.all_reduce(what(Kind::all_reduce, ReduceOp::avg), in.data(), in.data(), count);
        const auto expected = sums(size, count, 0, static_cast<float>(size));
        for (size_t i = 0; i < count; ++i) ASSERT_FLOAT_EQ(in[i], expected[i]) << i;
      }
      for (int root = 0; root < size; ++root) {
        auto in = values(me, count);
        group.reduce(what(Kind::reduce, ReduceOp::sum, root), in.data(), me == root ? in.data() : nullptr, count);
        EXPECT_EQ(in, me == root ? sums(size, count) : values(me, count)) << count << " to " << root;

        auto data = values(me, count);
        group.broadcast(what(Kind::broadcast, ReduceOp::sum, root), data.data(), count * 4);
        EXPECT_EQ(data, values(root, count)) << count << " from " << root;
      }
      const size_t each = count / static_cast<size_t>(size) + 1, bytes = each * 4;
      std::vector<float> all(each * size);
      std::vector<void*> outs;
      std::vector<const void*> ins;
      const auto aim = [&](std::vector<float>& blocks) {
        outs.clear(), ins.clear();
        for (int r = 0; r < size; ++r) outs.push_back(blocks.data() + each * r), ins.push_back(outs.back());
      };
      const auto whole_of = [&](int rank) {
        auto from = values(rank, each * size);
        return from;
      };
      {
        auto mine = whole_of(me);
        aim(mine);
        std::vector<float> out(each);
        group.reduce_scatter(what(Kind::reduce_scatter), ins.data(), out.data(), each);
        EXPECT_EQ(out, sums(size, each, each * me)) << count;
      }
      std::vector<float> gathered;
      for (int r = 0; r < size; ++r) {
        const auto theirs = values(r, each);
        gathered.insert(gathered.end(), theirs.begin(), theirs.end());
      }
      {
        const auto mine = values(me, each);
        aim(all);
        group.all_gather(what(Kind::all_gather), mine.data(), outs.data(), bytes);
        EXPECT_EQ(all, gathered) << count;
        std::fill(all.begin(), all.end(), 0.0F);
        std::copy(mine.begin(), mine.end(), all.begin() + static_cast<ptrdiff_t>(each) * me);
        group.all_gather(what(Kind::all_gather), outs[me], outs.data(), bytes);  // as FSDP calls it
        EXPECT_EQ(all, gathered) << count;
      }
      for (int root = 0; root < size; ++root) {
        const auto mine = values(me, each);
        std::fill(all.begin(), all.end(), 0.0F);
        aim(all);
        group.gather(what(Kind::gather, ReduceOp::sum, root), mine.data(), me == root ? outs.data() : nullptr, bytes);
        if (me == root) {
          EXPECT_EQ(all, gathered) << count << " to " << root;
        }

        auto source = whole_of(root);
        aim(source);
        std::vector<float> out(each);
        group.scatter(what(Kind::scatter, ReduceOp::sum, root), me == root ? ins.data() : nullptr, out.data(), bytes);
        EXPECT_EQ(out, values(root, each, each * me)) << count << " from " << root;
      }
      {
        auto mine = whole_of(me);
        std::vector<Bytes> from;
        std::vector<MutableBytes> to;
        for (int r = 0; r < size; ++r) {
          from.push_back({mine.data() + each * r, bytes});
          to.push_back({all.data() + each * r, bytes});
        }
        group.all_to_all(what(Kind::all_to_all), from.data(), to.data());
        for (int r = 0; r < size; ++r)
          EXPECT_EQ(std::vector<float>(all.begin() + each * r, all.begin() + each * (r + 1)),
                    values(r, each, each * me));
      }
      group.barrier(what(Kind::barrier));
    }
  });
  expect_quiet(thrown);
}
INSTANTIATE_TEST_SUITE_P(Of, NodesForms,
                         ::testing::Values(Form{2, 1, 1, 2}, Form{2, 2, 4}, Form{3, 1, 1}, Form{2, 1, 0}));
INSTANTIATE_TEST_SUITE_P(Uneven, NodesForms, ::testing::Values(Form::of({3, 1, 2}, 2, true), Form::of({1, 3}, 1)));
INSTANTIATE_TEST_SUITE_P(Night, NodesForms, ::testing::Values(Form{2, 3, 3}, Form::of({2, 3}, 5), Form::of({5, 2}, 0)));

// Sums of every type are those of the CPU's group, which adds in the same order; and alike on all ranks.
TEST_F(NodesTest, TypesAndOperations) {
  constexpr int kRanks = 3;
  constexpr size_t kCount = 50001;
  const struct {
    DType dtype;
    ReduceOp op;
  } cases[] = {{DType::bf16, ReduceOp::sum}, {DType::f16, ReduceOp::avg},     {DType::f64, ReduceOp::max},
               {DType::i32, ReduceOp::sum},  {DType::u8, ReduceOp::bor},      {DType::i64, ReduceOp::min},
               {DType::c64, ReduceOp::sum},  {DType::boolean, ReduceOp::band}};
  std::vector<std::vector<uint8_t>> results(kRanks);
  for (const auto& [dtype, op] : cases) {
    World world({kRanks, 1, 3});
    const size_t bytes = kCount * size_of(dtype);
    std::vector<std::vector<uint8_t>> inputs;
    for (int r = 0; r < kRanks; ++r) {
      inputs.push_back(pattern(bytes, 5 * r + 1));
      // Exponents of moderate size, so that sums are no NaN.
      if (dtype != DType::boolean)
        for (size_t i = 0; i < bytes; ++i) inputs[r][i] &= 0x3f;
    }
    expect_quiet(world.run([&, dtype = dtype, op = op](Communicator& group, World::Rank&, int me) {
      results[me] = inputs[me];
      group.all_reduce(world.operation(Kind::all_reduce, dtype, kCount, op), results[me].data(), results[me].data(),
                       kCount);
    }));
    std::vector<const void*> sources;
    for (const auto& input : inputs) sources.push_back(input.data());
    std::vector<uint8_t> expected(bytes);
    find_reduce(dtype, op)(expected.data(), nullptr, sources.data(), kRanks, kCount, nullptr);
    for (int r = 0; r < kRanks; ++r) EXPECT_EQ(results[r], expected) << name_of(dtype) << " " << name_of(op);
  }
}

// Numbers of chunks go on from launch to launch, as in a graph that is replayed.
TEST_F(NodesTest, ManyLaunches) {
  World world({2, 1, 1});
  constexpr int kTimes = 300;
  expect_quiet(world.run([&](Communicator& group, World::Rank& rank, int me) {
    for (int time = 0; time < kTimes; ++time) {
      const size_t count = 1 + static_cast<size_t>(time) * 37 % 9000;
      auto in = values(me, count, time);
      group.all_reduce(world.operation(Kind::all_reduce, DType::f32, count), in.data(), in.data(), count);
      ASSERT_EQ(in, sums(2, count, time)) << time;
    }
    EXPECT_GE(static_cast<NodesCommunicator&>(group).stage().requests(), uint64_t{kTimes});
    EXPECT_TRUE(rank.failures.empty());
  }));
}

// The requests of two nodes of two ranks, all together: tests/tools/test_simulate_rdma.py has the same figures.
TEST_F(NodesTest, AsksAsOftenAsTheSimulatorSays) {
  constexpr size_t kKb = 1 << 10, kMb = 1 << 20;
  const struct {
    Kind kind;
    size_t bytes;  // of the larger side
    uint64_t requests;
  } cases[] = {{Kind::all_reduce, 8 * kKb, 8},      {Kind::all_reduce, 6 * kMb, 256}, {Kind::all_gather, 4 * kMb, 64},
               {Kind::reduce_scatter, 4 * kMb, 64}, {Kind::all_to_all, 4 * kMb, 128}, {Kind::broadcast, 64 * kKb, 2},
               {Kind::broadcast, 4 * kMb, 64}};
  World world({2, 2, 4});
  world.shape.reset();
  world.scratch_bytes = BetweenStage::Setup{}.scratch_bytes;
  const uint64_t probes_after = test::LoneThread::probes_after_ns.exchange(uint64_t{1} << 60);  // a busy one waits
  std::atomic<uint64_t> asked[std::size(cases)][4] = {};
  const auto sum_of = [](const std::atomic<uint64_t>(&ranks)[4]) {
    return std::accumulate(std::begin(ranks), std::end(ranks), uint64_t{0});
  };
  expect_quiet(world.run([&](Communicator& group, World::Rank&, int me) {
    auto& stage = static_cast<NodesCommunicator&>(group).stage();
    uint64_t before = 0;
    for (size_t i = 0; i < std::size(cases); ++i) {
      const auto& [kind, bytes, requests] = cases[i];
      const size_t size = world.size(), block = bytes / size;
      std::vector<std::byte> in(bytes), out(bytes);
      const Operation operation = world.operation(kind, DType::f32, bytes / 4, ReduceOp::sum, 0);
      std::vector<void*> outs;
      std::vector<const void*> ins;
      std::vector<Bytes> sent;
      std::vector<MutableBytes> received;
      for (size_t r = 0; r < size; ++r) {
        ins.push_back(&in[r * block]), outs.push_back(&out[r * block]);
        sent.push_back({ins[r], block}), received.push_back({outs[r], block});
      }
      if (kind == Kind::all_reduce) group.all_reduce(operation, in.data(), out.data(), bytes / 4);
      if (kind == Kind::all_gather) group.all_gather(operation, ins[me], outs.data(), block);
      if (kind == Kind::reduce_scatter) group.reduce_scatter(operation, ins.data(), out.data(), block / 4);
      if (kind == Kind::all_to_all) group.all_to_all(operation, sent.data(), received.data());
      if (kind == Kind::broadcast) group.broadcast(operation, in.data(), bytes);
      // The last credits may be taken when the kernel has gone.
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      do {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        asked[i][me] = stage.requests() - before;
      } while (sum_of(asked[i]) < requests && std::chrono::steady_clock::now() < deadline);
      before += asked[i][me];
    }
  }));
  test::LoneThread::probes_after_ns = probes_after;
  for (size_t i = 0; i < std::size(cases); ++i)
    EXPECT_EQ(sum_of(asked[i]), cases[i].requests) << name_of(cases[i].kind) << " of " << cases[i].bytes;
}

TEST_F(NodesTest, OneThatRefusesIsNamedEverywhere) {
  World world({2, 1, 2});
  world.refusing = 1;
  for (const std::string& told : world.run([](Communicator&, World::Rank&, int) { FAIL(); }))
    EXPECT_NE(told.find("rank 1: a test wants it so"), std::string::npos) << told;
}

// Also one beyond the rails, and to one that has none.
TEST_F(NodesTest, OneThatRefusesInAnUnevenNodeIsNamedEverywhere) {
  for (const int refusing : {0, 2}) {
    World world(Form::of({1, 2}, 3));
    world.refusing = refusing;
    for (const std::string& told : world.run([](Communicator&, World::Rank&, int) { FAIL(); }))
      EXPECT_NE(told.find("rank " + std::to_string(refusing) + ": a test wants it so"), std::string::npos) << told;
  }
}

TEST_F(NodesTest, RegionsOverUnevenNodesAreRefusedEverywhere) {
  World world(Form::of({2, 3}, 0));
  expect_quiet(world.run([&](Communicator& group, World::Rank&, int) {
    std::string why;
    auto& stage = static_cast<NodesCommunicator&>(group).stage();
    EXPECT_FALSE(stage.region_window({.lanes = 1, .slots = 2, .chunk_bytes = 1024}, 1, nullptr, why));
    EXPECT_EQ(why, "rank 0: its nodes have unequal numbers of ranks");
  }));
}

// A rank without a rail waits for those of its node, and is waited for.
TEST_F(NodesTest, NoRankOfUnevenNodesWaitsForEver) {
  for (const int absent : {0, 2}) {
    World world(Form::of({1, 2}, 0), std::chrono::milliseconds(300));
    const auto thrown = world.run([&](Communicator& group, World::Rank&, int me) {
      std::vector<float> data(100000);
      if (me == absent) return std::this_thread::sleep_for(std::chrono::milliseconds(1200));
      group.all_reduce(world.operation(Kind::all_reduce, DType::f32, data.size()), data.data(), data.data(),
                       data.size());
    });
    for (int rank = 0; rank < world.size(); ++rank) EXPECT_EQ(thrown[rank].empty(), rank == absent) << thrown[rank];
    EXPECT_NE(thrown[absent == 0 ? 1 : 0].find("waited for rank " + std::to_string(absent == 0 ? 0 : 1)),
              std::string::npos)
        << thrown[0] << thrown[1];
  }
}

TEST_F(NodesTest, APeerThatDoesNotComeIsNamedAtTheLimit) {
  World world({2, 1, 0}, std::chrono::milliseconds(300));
  const auto thrown = world.run([&](Communicator& group, World::Rank&, int me) {
    std::vector<float> data(100000);
    if (me == 0)
      group.all_reduce(world.operation(Kind::all_reduce, DType::f32, data.size()), data.data(), data.data(),
                       data.size());
    else
      std::this_thread::sleep_for(std::chrono::milliseconds(600));
  });
  EXPECT_NE(thrown[0].find("waited for rank 1"), std::string::npos) << thrown[0];
  EXPECT_EQ(thrown[1], "");
}

// A link that comes back within the retries is not noticed; one that does not fails what kernels have asked for.
TEST_F(NodesTest, ALinkThatIsGoneFailsTheGroup) {
  World world({2, 1, 1}, std::chrono::seconds(20));
  std::atomic<int> ready{0};
  const auto thrown = world.run([&](Communicator& group, World::Rank& rank, int me) {
    std::vector<float> data(200000);
    const auto sum = [&] {
      group.all_reduce(world.operation(Kind::all_reduce, DType::f32, data.size()), data.data(), data.data(),
                       data.size());
    };
    sum();
    ++ready;
    test::wait_until("both", [&] { return ready == 2; });
    control().link_down = 1;
    const auto began = Clock::now();
    try {
      sum();
      ADD_FAILURE() << "rank " << me << " has a sum";
    } catch (const Error&) {
      EXPECT_LT(Clock::now() - began, std::chrono::seconds(15));
      EXPECT_FALSE(rank.failures.empty());
      for (const Error& error : rank.failures) EXPECT_EQ(error.context().peer, 1 - me) << error.what();
      throw;
    }
  });
  for (const std::string& told : thrown) EXPECT_NE(told.find("told to leave"), std::string::npos) << told;
  control().link_down = 0;
}

}  // namespace
}  // namespace ark::rdma_test
