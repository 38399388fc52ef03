// Tests the layout of a group's shared memory, and how many lanes a launch needs.
#include "collectives/cuda/arena.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "collectives/cuda/arena_memory.hpp"

namespace ark {
namespace {

// At these sizes a step gets one more row, so that a part that is 16 bytes shorter needs more lanes.
TEST(Lanes, AreThoseOfThePartThatTakesMost) {
  bool shorter_takes_more = false;
  for (const int ranks : {2, 3, 4, 5, 8}) {
    const RingSet set = ArenaLayout(ranks).collectives;
    for (const bool chunked : {false, true}) {
      const uint64_t row = chunked ? device::Chunks::kRowData : device::Lines::kRowData;
      for (uint64_t step = 1; step <= 20; ++step) {
        for (int64_t off = -16 * ranks; off <= 16 * ranks; off += 16) {
          const uint64_t part = row * set.lines.lanes * step + off;
          for (int shorter = 0; shorter < ranks; ++shorter) {
            std::vector<uint64_t> bytes(ranks, part);
            bytes[ranks - 1] -= 16 * shorter;
            const uint32_t lanes = lanes_of_parts(set, bytes.data(), ranks, chunked, set.chunks.lanes);
            for (const uint64_t each : bytes)
              ASSERT_LE(lanes_of(set, each, chunked, set.chunks.lanes), lanes) << each << " of " << part;
            ASSERT_LE(lanes, set.lines.lanes);
            shorter_takes_more |= lanes_of(set, bytes[ranks - 1], chunked, set.chunks.lanes) >
                                  lanes_of(set, part, chunked, set.chunks.lanes);
          }
        }
      }
    }
  }
  EXPECT_TRUE(shorter_takes_more) << "otherwise this test sees nothing";
}

// For any number of blocks, each chunk of a message belongs to one block, and the number of slots is a power of two
// that is large enough for the bulk rings to make progress.
TEST(Lanes, BlocksShareAMessage) {
  for (const uint32_t blocks : {1u, 3u, 16u, device::kMostRingBlocks}) {
    for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{8192}, uint64_t{8193}, uint64_t{1'000'003}}) {
      uint64_t sum = 0, end = 0;
      for (uint32_t block = 0; block < blocks; ++block) {
        const device::BulkShare<> share{bytes, block, blocks};
        for (uint32_t step = 0; step < share.steps(); ++step) {
          ASSERT_GT(share.size(step), 0u);
          sum += share.size(step), end = std::max(end, share.at(step) + share.size(step));
        }
        ASSERT_EQ(share.size(share.steps()), 0u);
      }
      EXPECT_EQ(sum, bytes);
      EXPECT_EQ(end, bytes);
    }
    for (const int ranks : {2, 4, 8}) {
      const ArenaLayout layout(ranks, {blocks, blocks, blocks});
      EXPECT_EQ(layout.results.bulk.lanes, blocks);
      EXPECT_GE(layout.results.bulk.depth, 4u);
      EXPECT_TRUE(std::has_single_bit(layout.results.bulk.depth));
      EXPECT_GE(layout.collectives.lines.lanes, blocks) << "landings have words for each";
      EXPECT_GE(layout.transfers.bulk.lanes, 1u);
      EXPECT_LE(layout.transfers.bulk.lanes, blocks);
      EXPECT_LE(layout.transfers.bulk.lanes * 2 * (ranks - 1), 128u) << "transfers with all peers wait at once";
    }
  }
}

// Bulk rings take memory only where the dispatch uses them.
TEST(Arena, HasTheBulkRingsThatTheDispatchUses) {
  constexpr uint64_t kTable = 4 << 20;  // of two ranks
  CudaDispatch dispatch;
  dispatch.leave_step_rings();
  const auto layout = [&] { return ArenaLayout(2, bulk_blocks_of(dispatch)); };
  const uint64_t without = layout().total;
  for (const RingSet& set : {layout().collectives, layout().results, layout().transfers}) EXPECT_EQ(set.bulk.lanes, 0u);
  const auto takes = [&](uint32_t collectives, uint32_t results, uint32_t transfers) {
    const ArenaLayout made = layout();
    EXPECT_EQ(made.collectives.bulk.lanes, collectives);
    EXPECT_EQ(made.results.bulk.lanes, results);
    EXPECT_EQ(made.transfers.bulk.lanes, transfers);
    const uint64_t tables = (collectives + results + transfers) / dispatch.ring_blocks * kTable;
    EXPECT_GE(made.total, without + tables);
    EXPECT_LT(made.total, without + tables + kTable / 16);
  };
  dispatch.bulk_move_from = 1 << 20;
  takes(16, 0, 0);
  dispatch.bulk_from = 1 << 20;
  takes(16, 16, 0);
  dispatch.bulk_send_from = 1 << 20;
  takes(16, 16, 16);
  dispatch.bulk_from = dispatch.bulk_move_from = CudaDispatch::kNever;
  takes(0, 0, 16);
}

// Both movers of a block can load and store at once, and a sender publishes before a ring is full.
TEST(Lanes, MoversShareStages) {
  for (uint32_t stages = 8; stages <= device::kBulkStages; ++stages) {
    const uint32_t taken = device::bulk_taken(stages), sent = stages - taken;
    EXPECT_GT(sent, taken) << "stores to peers take longer";
    for (const auto& [count, to_peers] : {std::pair(sent, true), {taken, false}, {stages, true}}) {
      const uint32_t ahead = device::bulk_ahead(count, to_peers);
      EXPECT_GE(ahead, 2u);
      EXPECT_LT(ahead, count);
      EXPECT_TRUE(!to_peers || count - ahead >= ahead) << count;
    }
  }
  EXPECT_EQ(device::bulk_lag(1024, 1), device::kBulkMostLag);
  for (const uint32_t chunks : {2u, 4u, 8u, 16u, 32u}) {
    for (const uint32_t each : {1u, 3u, 7u}) {
      const uint32_t lag = device::bulk_lag(chunks, each);
      EXPECT_GE(lag, 1u);
      EXPECT_LE(lag, device::kBulkMostLag);
      EXPECT_TRUE(lag == 1 || lag <= chunks / 4 * each) << "credits come late, and a full ring drains all stores";
    }
  }
}

// Captured steps have rings of their own behind the others, which stay where they are.
TEST(Lanes, OfCapturedStepsAreApart) {
  for (const int ranks : {2, 3, 4, 8}) {
    const ArenaLayout without(ranks, {16, 16, 16}), layout(ranks, {16, 16, 16, 32, 0, 0}),
        all(ranks, {16, 16, 16, 48, 48, 48});
    EXPECT_EQ(layout.transfers.bulk.slots, without.transfers.bulk.slots);
    EXPECT_EQ(layout.collectives.bulk.depth, without.collectives.bulk.depth);
    EXPECT_EQ(layout.collectives.step_bulk.lanes, 32u);
    EXPECT_GE(layout.collectives.step_bulk.state, without.total);
    EXPECT_EQ(layout.transfers.step_bulk.lanes, 0u);
    EXPECT_EQ(layout.results.step_bulk.lanes, 32u) << "a reduce_scatter's kernel reads their state";
    const uint64_t slots = uint64_t{layout.collectives.step_bulk.depth} * 32 * (ranks - 1) * device::kBulkChunk;
    EXPECT_LE(layout.total - without.total, slots + (64 << 10)) << "those of results have no slots";
    EXPECT_LE(slots, uint64_t{4 << 20} * (ranks - 1));
    EXPECT_EQ(all.results.step_bulk.lanes, 48u);
    EXPECT_LE(all.transfers.step_bulk.lanes * (ranks - 1), 64u);
    const auto end = [&](const device::RingTable& table) {
      return table.slots + uint64_t{table.lanes} * table.depth * (ranks - 1) * device::kBulkChunk;
    };
    EXPECT_LE(end(all.collectives.step_bulk), all.results.step_bulk.state);
    EXPECT_LE(end(all.results.step_bulk), all.transfers.step_bulk.state);
    EXPECT_LE(end(all.transfers.step_bulk), all.total);
  }
}

// Ranks that share a device: two launches of each at once, one block per lane, on 128 multiprocessors.
TEST(Lanes, OfAllSharersHaveRoomAtOnce) {
  for (const int ranks : {2, 3, 4, 5, 8}) {
    const ArenaLayout layout(ranks, {}, false);
    for (const RingSet& set : {layout.collectives, layout.results, layout.transfers}) {
      EXPECT_GE(set.lines.lanes, 1u);
      EXPECT_LE(2 * ranks * set.lines.lanes, 128u);
    }
  }
}

TEST(Lanes, NothingTakesNone) {
  const uint64_t none[2] = {0, 0};
  EXPECT_EQ(lanes_of_parts(ArenaLayout(2).collectives, none, 2, false, 16), 0u);
}

// The memory that a group pins on the host is bounded over all its ranks, and does not include what only one rank uses.
TEST(Arena, OnTheHostTakesLittle) {
  for (int ranks = 2; ranks <= device::kMaxRanks; ++ranks) {
    for (const auto& [device_each, blocks] : {std::pair(true, 16u), {true, 64u}, {false, 4u}}) {
      const ArenaLayout layout(ranks, {}, device_each, blocks), on_devices(ranks, {}, device_each);
      const uint64_t pages = (layout.total + kHostPage - 1) / kHostPage;
      EXPECT_LE(pages * kHostPage * ranks, uint64_t{64} << 20) << ranks;
      EXPECT_GE(layout.collectives.chunks.lanes, 4u) << ranks;
      EXPECT_LE(layout.collectives.chunks.lanes, on_devices.collectives.chunks.lanes);
      EXPECT_LE(layout.collectives.chunks.lanes, std::max(4u, blocks * device::ring_lanes(ranks))) << ranks;
      EXPECT_GE(layout.most_one_shot, uint64_t{64} << 10) << ranks;
      EXPECT_EQ(on_devices.own_total, 0u);
      EXPECT_EQ(on_devices.most_one_shot, most_one_shot_bytes(ranks));
      // Private and shared areas do not overlap, and each stays within its own memory.
      const RingSet& set = layout.collectives;
      const uint64_t states = uint64_t{sizeof(device::RingState)} * ranks * set.chunks.lanes;
      for (const RingSet* const each : {&layout.collectives, &layout.results, &layout.transfers})
        EXPECT_LE(each->chunks.state + states / (each == &layout.transfers ? 2 : 1), layout.own_total) << ranks;
      EXPECT_LE(layout.control + sizeof(device::GroupControl), layout.own_total);
      EXPECT_LE(layout.scratch + 16 * (ranks + 1), layout.own_total);
      EXPECT_LE(layout.transfers.chunks.slots + uint64_t{layout.transfers.chunks.lanes} * (ranks - 1) *
                                                    device::Chunks::kDepth * device::Chunks::kSlotBytes,
                layout.total);
    }
  }
}

}  // namespace
}  // namespace ark
