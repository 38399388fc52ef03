// Tests the dispatch table of CUDA tensors: the first matching rule applies, and all ranks use rank 0's table.
#include <gtest/gtest.h>

#include <thread>

#include "collectives/cuda/arena_memory.hpp"
#include "collectives/cuda/cuda_dispatch.hpp"
#include "support/processes.hpp"

namespace ark {
namespace {

constexpr uint64_t kAmple = uint64_t{1} << 40;

CudaDispatch numbered(uint64_t first) {
  CudaDispatch dispatch{};
  for (const CudaDispatchField& field : kCudaDispatchFields) dispatch.*field.value = first++;
  return dispatch;
}

TEST(CudaDispatch, FirstRuleThatApplies) {
  const std::vector<CudaRule> rules = {{2, numbered(10)}, {4, numbered(20)}};
  EXPECT_EQ(choose_dispatch(rules, 1).one_shot_to, 10u);
  EXPECT_EQ(choose_dispatch(rules, 2).one_shot_to, 10u);
  EXPECT_EQ(choose_dispatch(rules, 3).one_shot_to, 20u);
  EXPECT_EQ(choose_dispatch(rules, 8).one_shot_to, CudaDispatch::measured(8).one_shot_to);
  EXPECT_EQ(choose_dispatch({}, 2).copy_engine_from, CudaDispatch::measured(2).copy_engine_from);
}

TEST(CudaDispatch, AllTakeRankZeros) {
  const test::TemporaryDirectory folder;
  std::vector<CudaDispatch> found(3);
  std::vector<std::thread> ranks;
  for (int rank = 2; rank >= 0; --rank) {
    ranks.emplace_back([&, rank] {
      test::DirectoryStore store(folder.path());
      if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      found[rank] = agree_on_dispatch(store, rank, 3, {{8, numbered(100 * (rank + 1))}}, {kAmple, true}, [] {});
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const CudaDispatch& dispatch : found)
    for (const CudaDispatchField& field : kCudaDispatchFields)
      EXPECT_EQ(dispatch.*field.value, numbered(100).*field.value) << field.name;
}

TEST(CudaDispatch, MeasuredNumbersReplaceTheBuiltInOnes) {
  const CudaDispatch made = CudaDispatch::measured(2, {{"one_shot_to", 7}, {"bulk_from", CudaDispatch::kNever}});
  EXPECT_EQ(made.one_shot_to, 7u);
  EXPECT_EQ(made.copy_engine_from, CudaDispatch::measured(2).copy_engine_from);
  EXPECT_THROW(CudaDispatch::measured(2, {{"one_shot", 7}}), Error);
}

// Rank 0 says that the ranks measure; afterwards they agree once more, under another key.
TEST(CudaDispatch, AllLearnThatTheyMeasure) {
  const test::TemporaryDirectory folder;
  test::DirectoryStore store(folder.path());
  DispatchLimits limits{kAmple};
  limits.to_measure = true;
  EXPECT_TRUE(agree_on_dispatch(store, 0, 2, {}, limits, [] {}).to_measure);
  EXPECT_TRUE(agree_on_dispatch(store, 1, 2, {}, {kAmple}, [] {}).to_measure);
  limits.to_measure = false, limits.key = "dispatch/measured";
  agree_on_dispatch(store, 0, 2, {{2, numbered(1000)}}, limits, [] {});
  const CudaDispatch told = agree_on_dispatch(store, 1, 2, {}, limits, [] {});
  EXPECT_FALSE(told.to_measure);
  EXPECT_EQ(told.one_shot_to, numbered(1000).one_shot_to);
}

TEST(CudaDispatch, BufferIsLimitedByRankZeroToo) {
  const test::TemporaryDirectory folder;
  test::DirectoryStore store(folder.path());
  EXPECT_EQ(agree_on_dispatch(store, 0, 2, {{2, numbered(1000)}}, {5}, [] {}).buffer_bytes, 5u);
  EXPECT_EQ(agree_on_dispatch(store, 1, 2, {{2, numbered(1000)}}, {7}, [] {}).buffer_bytes, 5u);
}

TEST(CudaDispatch, SumsInOtherOrdersMustBeAskedFor) {
  const test::TemporaryDirectory folder;
  test::DirectoryStore store(folder.path());
  const CudaDispatch exact = agree_on_dispatch(store, 0, 2, {{2, numbered(1000)}}, {kAmple, false}, [] {});
  EXPECT_EQ(exact.nccl_all_reduce_from, CudaDispatch::kNever);
  EXPECT_EQ(exact.nccl_reduce_from, CudaDispatch::kNever);
  EXPECT_EQ(exact.nccl_reduce_scatter_from, CudaDispatch::kNever);
  EXPECT_EQ(exact.nccl_all_gather_from, numbered(1000).nccl_all_gather_from) << "only moves bytes";
  // Rank 0's choice applies, as for everything in the table.
  const CudaDispatch told = agree_on_dispatch(store, 1, 2, {{2, numbered(1000)}}, {kAmple, true}, [] {});
  EXPECT_EQ(told.nccl_all_reduce_from, CudaDispatch::kNever);
}

TEST(CudaDispatch, NcclHasWhatItWasMeasuredToBeFasterAt) {
  constexpr uint64_t kNever = CudaDispatch::kNever, kMB = 1 << 20;
  const CudaDispatch four = choose_dispatch({}, 4, "NVIDIA H200");
  EXPECT_TRUE(four.nccl_of_model);
  EXPECT_EQ(four.nccl_all_reduce_from, 64 * kMB);
  EXPECT_EQ(four.nccl_reduce_scatter_from, kNever);
  EXPECT_EQ(four.nccl_all_reduce_to, kNever);
  EXPECT_EQ(four.nccl_all_gather_from, kNever);
  EXPECT_EQ(four.one_shot_to, CudaDispatch::measured(4).one_shot_to);
  // Nothing that was not measured: other models, other numbers of ranks, and what a table leaves out.
  const auto has_any = [](const CudaDispatch& dispatch) {
    bool any = dispatch.nccl_of_model;
    for (const NcclSizes& sizes : kNcclSizes) any = any || dispatch.*sizes.from != kNever;
    return any;
  };
  for (const char* model : {"", "NVIDIA H200 NVL", "NVIDIA B200", "H200"})
    for (const int ranks : {2, 4}) EXPECT_FALSE(has_any(choose_dispatch({}, ranks, model))) << model;
  for (const int ranks : {1, 2, 3, 5, 8}) EXPECT_FALSE(has_any(choose_dispatch({}, ranks, "NVIDIA H200"))) << ranks;
  EXPECT_FALSE(has_any(choose_dispatch({{4, CudaDispatch::measured(4, {})}}, 4, "NVIDIA H200")));
}

TEST(CudaDispatch, RankZerosModelCounts) {
  const test::TemporaryDirectory folder;
  test::DirectoryStore store(folder.path());
  DispatchLimits limits{kAmple};
  limits.model = "NVIDIA H200";
  const CudaDispatch exact = agree_on_dispatch(store, 0, 4, {}, limits, [] {});
  EXPECT_EQ(exact.nccl_all_reduce_from, CudaDispatch::kNever) << "NCCL adds in another order";
  limits.key = "fast", limits.fast = true;
  agree_on_dispatch(store, 0, 4, {}, limits, [] {});
  limits.model = "", limits.fast = false;
  const CudaDispatch told = agree_on_dispatch(store, 1, 4, {}, limits, [] {});
  EXPECT_EQ(told.nccl_all_reduce_from, uint64_t{64} << 20);
  EXPECT_TRUE(told.nccl_of_model);
}

TEST(CudaDispatch, OptionsOfRankZeroAreTold) {
  const test::TemporaryDirectory folder;
  test::DirectoryStore store(folder.path());
  for (const PeerAccess access : {PeerAccess::tested, PeerAccess::trusted, PeerAccess::avoided}) {
    for (const bool flag : {false, true}) {
      const DispatchLimits wish{kAmple, flag, access, !flag}, other{kAmple, !flag, PeerAccess::tested, flag};
      agree_on_dispatch(store, 0, 2, {}, wish, [] {});
      const CudaDispatch told = agree_on_dispatch(store, 1, 2, {}, other, [] {});
      EXPECT_EQ(told.peer_access, access);
      EXPECT_EQ(told.any_order, flag);
      EXPECT_EQ(told.nccl_leaves_p2p, !flag);
    }
  }
}

TEST(CudaDispatch, CapturedStepsHaveSizesOfTheirOwn) {
  constexpr uint64_t kNever = CudaDispatch::kNever;
  CudaDispatch two = CudaDispatch::measured(2);
  const std::string blocks_carry = "32 blocks carry reduce_scatters from 1024 KB on, moves from 1024 KB on";
  const std::string engines_carry = "copy engines carry all_reduces from 24576 KB on";
  EXPECT_EQ(two.step_carried(), blocks_carry + ", " + engines_carry);
  EXPECT_EQ(CudaDispatch::measured(2, {{"copy_engine_from", 24 << 20}}).step_carried(), blocks_carry);
  EXPECT_EQ(two.step_all_reduce_from, kNever) << "copy engines win there";
  EXPECT_EQ(
      CudaDispatch::measured(4).step_carried(),
      "32 blocks carry all_reduces from 1024 KB on (16 of them), reduce_scatters from 1024 KB on, moves from 1024 "
      "KB on");
  EXPECT_EQ(CudaDispatch::measured(8).step_carried(), "") << "not measured";
  BulkBlocks blocks = bulk_blocks_of(two);
  EXPECT_EQ(blocks.step, 32u);
  EXPECT_EQ(blocks.step_results, 0u) << "all_reduces alone have results";
  EXPECT_EQ(blocks.step_transfers, 0u);
  blocks = bulk_blocks_of(CudaDispatch::measured(4, {{"step_send_from", 1}, {"step_blocks", 8}}));
  EXPECT_EQ(blocks.collectives, 32u);
  EXPECT_EQ(blocks.step_results, 8u);
  EXPECT_EQ(blocks.step_transfers, 8u);
  EXPECT_EQ(CudaDispatch::measured(2, {{"step_blocks", 0}}).step_carried(), engines_carry);
  two.leave_step_rings();
  EXPECT_EQ(bulk_blocks_of(two).step, 0u);
  EXPECT_EQ(bulk_blocks_of(two).collectives, 32u);
  two.leave_bulk_rings();
  EXPECT_EQ(bulk_blocks_of(two).collectives, 0u);
  EXPECT_EQ(CudaDispatch::measured(4).through_host(4, false).step_carried(), "");
}

TEST(CudaDispatch, ThroughTheHost) {
  constexpr uint64_t kNever = CudaDispatch::kNever;
  const CudaDispatch alone = CudaDispatch::measured(2).through_host(2, false);
  EXPECT_EQ(alone.copy_engine_from, kNever);
  EXPECT_EQ(alone.chunks_from, 0u) << "lines need 128 bytes that arrive at once";
  EXPECT_EQ(alone.nccl_all_gather_from, kNever);
  const CudaDispatch two = CudaDispatch::measured(2).through_host(2, true);
  EXPECT_LT(two.nccl_all_reduce_from, two.nccl_all_reduce_to);
  EXPECT_LT(two.nccl_all_reduce_to, uint64_t{64} << 20) << "measured: memory of the host is faster";
  CudaDispatch three = CudaDispatch::measured(3);
  EXPECT_EQ(three.through_host(3, true).nccl_all_reduce_from, kNever) << "its bits would change with the size";
  EXPECT_EQ(three.through_host(3, true).nccl_all_gather_to, two.nccl_all_gather_to);
  three.any_order = true;
  EXPECT_EQ(three.through_host(3, true).nccl_reduce_scatter_to, two.nccl_reduce_scatter_to);
  // What was measured over peers' memory does not count.
  CudaDispatch peers = choose_dispatch({}, 4, "NVIDIA H200");
  peers.any_order = true;
  EXPECT_EQ(peers.through_host(4, false).nccl_all_reduce_from, kNever);
  EXPECT_EQ(peers.through_host(4, true).nccl_all_reduce_to, two.nccl_all_reduce_to);
  // A user's own table is kept.
  three.nccl_broadcast_from = 5, three.nccl_reduce_to = 7;
  const CudaDispatch own = three.through_host(3, true);
  EXPECT_EQ(own.nccl_broadcast_from, 5u);
  EXPECT_EQ(own.nccl_broadcast_to, kNever);
  EXPECT_EQ(own.nccl_reduce_from, kNever);
}

TEST(CudaDispatch, WaitingEndsWithTheGroup) {
  const test::TemporaryDirectory folder;
  test::DirectoryStore store(folder.path());
  const auto lost = [] { throw Error(ErrorKind::peer_lost, "rank 0 is gone"); };
  EXPECT_THROW(agree_on_dispatch(store, 1, 2, {}, {kAmple}, lost), Error);
  store.set("dispatch", {1, 2, 3});
  EXPECT_THROW(agree_on_dispatch(store, 1, 2, {}, {kAmple}, [] {}), Error) << "another version";
  EXPECT_EQ(agree_on_dispatch(store, 0, 1, {{1, numbered(7)}}, {kAmple}, lost).one_shot_to, 7u) << "alone";
}

}  // namespace
}  // namespace ark
