// The layout of a rank's symmetric memory. Offsets are the same on all ranks of a group.
//
// In host memory the arena is pinned and all ranks share kHostBytes, so there are few lanes (CudaDispatch::host_blocks)
// and no rings of lines, which are not used there. Data that is private to a rank (marked "own") is then in separate
// memory on its device, with offsets of its own.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "cuda/bulk_lane.cuh"
#include "cuda/chunks.cuh"
#include "cuda/lines.cuh"
#include "cuda/one_shot.cuh"
#include "cuda/peer_test.cuh"

namespace ark {

inline constexpr uint64_t kHostBytes = 64 << 20;
// Per rank, in whole pages of the driver.
inline constexpr uint64_t kHostPage = 2 << 20;
constexpr uint64_t host_bytes(int ranks) {
  return kHostBytes / ranks / kHostPage * kHostPage;
}

constexpr uint64_t most_one_shot_bytes(int ranks) {
  return (ranks <= 2 ? 512 : 256) * 1024;
}

// Per rank: what it writes here by stores and by copies, and what this rank copies to it.
inline constexpr uint64_t kPeerTestBytes = device::kPeerTestUnits * 16;
constexpr uint64_t peer_test_bytes(int ranks) {
  return 3 * ranks * kPeerTestBytes;
}

// Blocks of the bulk rings of each set; 0: none, which saves 2 MB a peer and set (of two ranks 4 MB).
struct BulkBlocks {
  uint32_t collectives = 0, results = 0, transfers = 0;
  // In captured steps: of collectives, of results that all_reduces distribute, and of transfers.
  uint32_t step = 0, step_results = 0, step_transfers = 0;
};

struct RingSet {
  device::RingTable lines, chunks;
  device::LandingTable landings;
  device::RingTable bulk{}, step_bulk{};
};

// The number of lanes that a message uses, of at most `chunk_lanes` in chunks.
inline uint32_t lanes_of(const RingSet& set, uint64_t bytes, bool chunked, uint32_t chunk_lanes) {
  if (bytes == 0) return 0;
  return chunked ? device::spread_of<device::Chunks>(bytes, chunk_lanes).lanes
                 : device::spread_of<device::Lines>(bytes, set.lines.lanes).lanes;
}

// The most lanes of any rank's part. A shorter part may use more lanes than a longer one, with shorter steps.
inline uint32_t lanes_of_parts(const RingSet& set, const uint64_t* bytes, int ranks, bool chunked,
                               uint32_t chunk_lanes) {
  uint32_t lanes = 0;
  for (int r = 0; r < ranks; ++r) lanes = std::max(lanes, lanes_of(set, bytes[r], chunked, chunk_lanes));
  return lanes;
}

// Kernels of ranks wait for each other. So ranks that share a GPU need room for all of their kernels at once, including
// each rank's next launch, which may begin early. This many blocks per launch fit on a large GPU's 128 multiprocessors.
constexpr uint32_t blocks_of_a_sharer(int ranks) {
  return 64 / ranks;
}

struct ArenaLayout {
  // device_each: no two ranks share a device; otherwise blocks are at most blocks_of_a_sharer(). host_blocks: blocks of
  // a launch if the memory is the host's; 0: it is the devices'.
  explicit ArenaLayout(int ranks, const BulkBlocks& bulk = {}, bool device_each = true, uint32_t host_blocks = 0);

  size_t control;                             // own: device::GroupControl
  size_t peer_test;                           // only PeerTest writes here (peer_test.hpp)
  size_t one_shot;                            // packets: [2][ranks][capacity]
  uint64_t one_shot_capacity, most_one_shot;  // in packets; in bytes
  RingSet collectives;
  RingSet results;    // results that owners of parts distribute
  RingSet transfers;  // send and recv
  size_t scratch;     // own: [ranks + 1][16] bytes, this rank's word and all ranks' words
  size_t total;
  size_t own_total;  // 0: own data is in the arena too

 private:
  static uint32_t host_lanes(int ranks, uint64_t bytes, uint32_t most);
};

// The number of lanes that fit into `bytes`: for collectives, results and, half as many, transfers.
inline uint32_t ArenaLayout::host_lanes(int ranks, uint64_t bytes, uint32_t most) {
  const uint64_t words = 2 * (8 + 8) + 16 + 8;  // of two kinds of rings and of landings
  const uint64_t lane = (ranks - 1) * device::Chunks::kDepth * device::Chunks::kSlotBytes + ranks * words;
  const uint64_t fit = bytes / (5 * lane / 2);
  return static_cast<uint32_t>(std::clamp<uint64_t>(fit / 4 * 4, 4, most));
}

inline ArenaLayout::ArenaLayout(int ranks, const BulkBlocks& bulk, bool device_each, uint32_t host_blocks) {
  const bool on_host = host_blocks != 0;
  size_t at = 0, own_at = 0;
  const auto take_at = [](size_t& place, size_t bytes) {
    const size_t here = place;
    place += (bytes + 1023) / 1024 * 1024;
    return here;
  };
  const auto take = [&](size_t bytes) { return take_at(at, bytes); };
  const auto take_own = [&](size_t bytes) { return take_at(on_host ? own_at : at, bytes); };
  const auto table = [&](uint32_t lanes, size_t ring_bytes) {
    device::RingTable made{};
    made.lanes = lanes;
    made.state = take_own(ranks * lanes * sizeof(device::RingState));
    made.credits = take(ranks * lanes * sizeof(uint64_t));
    made.arrived = take(ranks * lanes * sizeof(uint64_t));
    made.slots = take((ranks - 1) * lanes * ring_bytes);
    return made;
  };
  const auto rings = [&](uint32_t lanes) {
    const uint64_t pairs = static_cast<uint64_t>(ranks) * lanes;
    return RingSet{table(lanes, on_host ? 0 : device::Lines::kDepth * device::Lines::kSlotBytes),
                   table(lanes, device::Chunks::kDepth * device::Chunks::kSlotBytes),
                   {take(16 * pairs), take(8 * pairs), take_own(sizeof(device::LandingState) * pairs)}};
  };
  control = take_own(sizeof(device::GroupControl));
  scratch = take_own(16 * (ranks + 1));
  peer_test = take(on_host ? 0 : peer_test_bytes(ranks));
  const auto packets = [&] { return 2 * ranks * device::one_shot_packets(most_one_shot) * 16; };
  most_one_shot = most_one_shot_bytes(ranks);
  while (on_host && packets() > host_bytes(ranks) / 4) most_one_shot /= 2;
  one_shot_capacity = device::one_shot_packets(most_one_shot);
  one_shot = take(packets());
  const uint32_t most_lanes = ranks <= 2 ? 512 : ranks <= 4 ? 256 : 128;
  uint32_t lanes = device_each ? most_lanes : blocks_of_a_sharer(ranks);
  constexpr uint64_t kRounding = 64 << 10;  // what take() adds
  if (on_host) {
    lanes = std::min<uint32_t>(lanes, host_blocks * device::ring_lanes(ranks));
    lanes = host_lanes(ranks, host_bytes(ranks) - at - kRounding, lanes);
  }
  collectives = rings(lanes);
  results = rings(lanes);
  transfers = rings(lanes / 2);
  // `filled`: false for rings of which kernels only read the state.
  const auto bulk_rings = [&](RingSet& set, uint32_t blocks, bool filled = true) {
    if (blocks == 0) return device::RingTable{};
    // Per pair of ranks: what a link carries in about 10 us.
    const uint32_t chunks = (ranks <= 2 ? 4 << 20 : 2 << 20) / device::kBulkChunk;
    const uint32_t depth = std::bit_floor(chunks / blocks);
    // Launches of transfers with all peers may wait at once, on a multiprocessor each.
    const uint32_t most = &set == &transfers ? std::max(64 / (ranks - 1), 1) : blocks;
    device::RingTable made = table(std::min(blocks, most), filled ? depth * device::kBulkChunk : 0);
    made.depth = depth;
    return made;
  };
  collectives.bulk = bulk_rings(collectives, bulk.collectives);
  results.bulk = bulk_rings(results, bulk.results);
  transfers.bulk = bulk_rings(transfers, bulk.transfers);
  collectives.step_bulk = bulk_rings(collectives, bulk.step);
  results.step_bulk = bulk_rings(results, bulk.step, bulk.step_results != 0);
  transfers.step_bulk = bulk_rings(transfers, bulk.step_transfers);
  total = at;
  own_total = own_at;
}

}  // namespace ark
