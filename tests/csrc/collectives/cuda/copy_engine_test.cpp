// Tests collectives over copy engines. All ranks and their streams run in this process, on host memory
// (fake_driver.hpp).
#include "collectives/cuda/copy_engine_group.hpp"
#include "support/night.hpp"

namespace ark {
namespace {

using test::Collective;
using test::Group;
using test::Queues;

class CopyEngineTest : public testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(CopyEngineTest, RandomOperationsOneAfterTheOther) {
  const auto [ranks, windows] = GetParam();
  for (uint64_t seed = 1; seed <= 1U + test::cases(2); ++seed) {
    Group group(ranks, seed, windows);
    test::g_capturing = seed == 2;
    for (int i = 0; i < (ranks == 8 ? 12 : 40); ++i) group.prepare(group.draw());
    group.run();
    group.check_results();
    test::g_capturing = false;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, CopyEngineTest, testing::Combine(testing::Values(2, 3, 4, 8), testing::Bool()),
                         [](const auto& tested) {
                           return std::to_string(std::get<0>(tested.param)) +
                                  (std::get<1>(tested.param) ? "Registered" : "Plain");
                         });

// As with CUDA_DEVICE_MAX_CONNECTIONS=1: each operation of a rank waits for all that the rank submitted before.
class CopyEngineOneQueueTest : public testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(CopyEngineOneQueueTest, AllKindsInManyPiecesAndInOne) {
  const auto [ranks, windows] = GetParam();
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    Group group(ranks, seed, windows, Queues::shared);
    test::g_capturing = seed == 2;
    for (Collective kind : {Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather,
                            Collective::broadcast, Collective::all_to_all}) {
      const uint64_t many =
          kind == Collective::all_reduce ? 60'000 : 92'160 / (2 * ranks - 1);  // more pieces than slots
      for (uint64_t count : {many, uint64_t{500}})
        group.prepare({kind, count, count != many, static_cast<int>(seed) % ranks, seed * 10 + (count == many),
                       windows && kind != Collective::all_to_all && seed % 2 != 0});
    }
    group.run();
    group.check_results();
    test::g_capturing = false;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, CopyEngineOneQueueTest, testing::Combine(testing::Range(2, 9), testing::Bool()),
                         [](const auto& tested) {
                           return std::to_string(std::get<0>(tested.param)) +
                                  (std::get<1>(tested.param) ? "Registered" : "Plain");
                         });

// The driver calls that an eager all_reduce in two pieces costs the issuing thread, without the two launches that add.
TEST(CopyEngineInLine, TakesFewCallsOfTheDriver) {
  Group group(2, 2, false);  // sums are fetched
  group.engines_[1]->in_line_to = 0;
  for (int i = 0; i < 2; ++i) group.prepare({Collective::all_reduce, 12'000, true, 0, 7, false});
  const auto calls_of = [&](int rank, int step) {
    const int before = test::g_calls;
    group.issue(rank, group.steps_[step], group.tensors_[step]);
    return test::g_calls - before;
  };
  for (int step : {0, 1}) {
    EXPECT_EQ(calls_of(0, step), 11);
    EXPECT_GE(calls_of(1, step), 30);
  }
  for (int r : {0, 1}) driver().stream_synchronize(group.streams_[r]);
  group.check_results();
}

// The end of a call on the engine's own streams is reported to the host independently of the caller's stream.
TEST(CopyEngineInLine, IsBusyBehindOthers) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    Group group(2, seed, false);
    group.prepare({Collective::all_gather, 900, false, 0, 7, false});
    group.prepare({Collective::all_reduce, 900, true, 0, 7, false});
    for (auto [rank, step] : {std::pair(0, 0), {1, 0}, {0, 1}})
      group.issue(rank, group.steps_[step], group.tensors_[step]);
    test::wait_until("the second call", [&] { return protocol::load_relaxed(group.status_[0].beat) == 2; });
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT_EQ(protocol::load_relaxed(group.status_[0].busy), 1u) << seed;
    group.issue(1, group.steps_[1], group.tensors_[1]);
    for (int r : {0, 1}) driver().stream_synchronize(group.streams_[r]);
    group.check_results();
  }
}

TEST(CopyEngineMemory, IsLimited) {
  EXPECT_EQ(CopyEngine::memory_bytes(2, 0), 0u);
  EXPECT_EQ(CopyEngine::memory_bytes(2, 5 << 20), 0u);
  for (int ranks : {2, 3, 8}) {
    const uint64_t bytes = CopyEngine::memory_bytes(ranks, 64 << 20);
    EXPECT_GT(bytes, 32u << 20);
    EXPECT_LE(bytes, 64u << 20);
    EXPECT_LE(CopyEngine::memory_bytes(ranks, uint64_t{1} << 40), 390u << 20);
  }
}

class CopyEngineMissingTest : public testing::TestWithParam<std::tuple<int, int>> {};

// One rank never calls. The others must name it, and their waits must end.
TEST_P(CopyEngineMissingTest, IsNamedAndAllWaitsEnd) {
  const auto [ranks, missing] = GetParam();
  test::g_garbage = true;
  Group group(ranks, 5, false);
  for (int i = 0; i < 6; ++i) group.prepare({Collective::all_reduce, 30'000, true, 0, 7, false});
  std::vector<int> others;
  for (int r = 0; r < ranks; ++r)
    if (r != missing) others.push_back(r);
  for (int r : others)
    for (size_t i = 0; i < group.steps_.size(); ++i) group.issue(r, group.steps_[i], group.tensors_[i]);
  for (int r : others) {
    test::wait_until("busy", [&] { return protocol::load_relaxed(group.status_[r].busy) == 1; });
    test::wait_until("a diagnosis", [&] { return group.engines_[r]->diagnose().peer == missing; });
    EXPECT_FALSE(group.engines_[r]->diagnose().mismatched);
  }
  group.release(others);
  test::g_garbage = false;
}
INSTANTIATE_TEST_SUITE_P(Ranks, CopyEngineMissingTest,
                         testing::Values(std::tuple{2, 0}, std::tuple{3, 1}, std::tuple{4, 0}, std::tuple{4, 3},
                                         std::tuple{8, 5}));

// Ranks that pass different offsets of windows must write nothing and report it.
TEST(CopyEngineFailures, DifferentPlacesAreFoundOut) {
  Group group(2, 5, true);
  group.prepare({Collective::all_gather, 5'000, false, 0, 7, true});
  group.prepare({Collective::all_gather, 5'000, false, 0, 8, true});
  group.issue(0, group.steps_[0], group.tensors_[0]);
  group.issue(1, group.steps_[1], group.tensors_[1]);
  for (int r : {0, 1}) {
    test::wait_until("a diagnosis", [&] { return group.engines_[r]->diagnose().mismatched; });
    EXPECT_EQ(group.engines_[r]->diagnose().peer, 1 - r);
  }
  for (int step : {0, 1})
    for (int r : {0, 1})
      for (int from : {0, 1})
        if (from != r) {
          EXPECT_EQ(group.tensors_[step][r].out[from * 5'000], 0xdeadbeef);
        }
  test::g_garbage = true;
  group.release({0, 1});
  test::g_garbage = false;
}

// One rank passes registered memory and the other does not, so that the other would have its sums fetched.
TEST(CopyEngineFailures, FetchedAgainstRegisteredIsFoundOut) {
  for (int registered : {0, 1}) {
    Group group(2, 5, true);  // sums of any length are fetched
    group.prepare({Collective::all_reduce, 30'000, false, 0, 7, true});
    group.prepare({Collective::all_reduce, 30'000, false, 0, 7, false});
    group.issue(registered, group.steps_[0], group.tensors_[0]);
    group.issue(1 - registered, group.steps_[1], group.tensors_[1]);
    for (int r : {0, 1}) {
      test::wait_until("a diagnosis", [&] { return group.engines_[r]->diagnose().mismatched; });
      EXPECT_EQ(group.engines_[r]->diagnose().peer, 1 - r);
    }
    for (int i = 0; i < 30'000; ++i) {
      EXPECT_EQ(group.tensors_[0][1 - registered].out[i], 0xdeadbeef) << i;
      if (i / 15'000 == registered) {  // the other rank may have written its own part
        EXPECT_EQ(group.tensors_[1][1 - registered].out[i], 0xdeadbeef) << i;
      }
    }
    test::g_garbage = true;
    group.release({0, 1});
    test::g_garbage = false;
  }
}

// All submitted work is queued behind a wait, and the watching thread submits nothing.
TEST(CopyEngineFailures, WaitsOfOneQueueEndToo) {
  test::g_garbage = true;
  Group group(3, 5, false, Queues::shared);
  for (int i = 0; i < 3; ++i) group.prepare({Collective::all_reduce, 30'000, true, 0, 7, false});
  for (int r : {0, 2})
    for (size_t i = 0; i < group.steps_.size(); ++i) group.issue(r, group.steps_[i], group.tensors_[i]);
  for (int r : {0, 2}) test::wait_until("a diagnosis", [&] { return group.engines_[r]->diagnose().peer == 1; });
  group.release({0, 2});
  test::g_garbage = false;
}

}  // namespace
}  // namespace ark
