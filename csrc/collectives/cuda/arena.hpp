// How a rank's symmetric memory is divided. Offsets are the same on all ranks of a group.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "cuda/bulk_lane.cuh"
#include "cuda/chunks.cuh"
#include "cuda/lines.cuh"
#include "cuda/one_shot.cuh"

namespace ark {

constexpr uint64_t most_one_shot_bytes(int ranks) {
  return (ranks <= 2 ? 512 : 256) * 1024;
}

struct RingSet {
  device::RingTable lines, chunks;
  device::LandingTable landings;
  device::RingTable bulk{};
};

// That a message takes part in.
inline uint32_t lanes_of(const RingSet& set, uint64_t bytes, bool chunked) {
  if (bytes == 0) return 0;
  return chunked ? device::spread_of<device::Chunks>(bytes, set.chunks.lanes).lanes
                 : device::spread_of<device::Lines>(bytes, set.lines.lanes).lanes;
}

// The same of one part a rank: a shorter part may take more lanes than a longer one, of shorter steps.
inline uint32_t lanes_of_parts(const RingSet& set, const uint64_t* bytes, int ranks, bool chunked) {
  uint32_t lanes = 0;
  for (int r = 0; r < ranks; ++r) lanes = std::max(lanes, lanes_of(set, bytes[r], chunked));
  return lanes;
}

// Kernels of ranks wait for each other, so those of ranks that share a GPU must have room on it at once, with the next
// launch of each, which may begin early: so many blocks of a rank's launch do, on the 128 multiprocessors of a large
// GPU.
constexpr uint32_t blocks_of_a_sharer(int ranks) {
  return 64 / ranks;
}

struct ArenaLayout {
  // ring_blocks: lanes of the rings in bulk; 0: none. device_each: no two ranks share a device; else ring_blocks is at
  // most blocks_of_a_sharer().
  explicit ArenaLayout(int ranks, uint32_t ring_blocks = 0, bool device_each = true);

  size_t control;   // device::GroupControl
  size_t one_shot;  // packets: [2][ranks][capacity]
  uint64_t one_shot_capacity;
  RingSet collectives;
  RingSet results;    // what owners of parts hand out
  RingSet transfers;  // send and recv
  size_t scratch;     // [ranks + 1][16] bytes: this rank's word and all ranks' words
  size_t total;
};

inline ArenaLayout::ArenaLayout(int ranks, uint32_t ring_blocks, bool device_each) {
  size_t at = 0;
  auto take = [&](size_t bytes) {
    const size_t here = at;
    at += (bytes + 1023) / 1024 * 1024;
    return here;
  };
  const auto table = [&](uint32_t lanes, size_t ring_bytes) {
    device::RingTable made{};
    made.lanes = lanes;
    made.state = take(ranks * lanes * sizeof(device::RingState));
    made.credits = take(ranks * lanes * sizeof(uint64_t));
    made.arrived = take(ranks * lanes * sizeof(uint64_t));
    made.slots = take((ranks - 1) * lanes * ring_bytes);
    return made;
  };
  const auto rings = [&](uint32_t lanes) {
    const uint64_t pairs = static_cast<uint64_t>(ranks) * lanes;
    return RingSet{table(lanes, device::Lines::kDepth * device::Lines::kSlotBytes),
                   table(lanes, device::Chunks::kDepth * device::Chunks::kSlotBytes),
                   {take(16 * pairs), take(8 * pairs), take(sizeof(device::LandingState) * pairs)}};
  };
  control = take(sizeof(device::GroupControl));
  scratch = take(16 * (ranks + 1));
  one_shot_capacity = device::one_shot_packets(most_one_shot_bytes(ranks));
  one_shot = take(2 * ranks * one_shot_capacity * 16);
  const uint32_t most_lanes = ranks <= 2 ? 512 : ranks <= 4 ? 256 : 128;
  const uint32_t lanes = device_each ? most_lanes : blocks_of_a_sharer(ranks);
  collectives = rings(lanes);
  results = rings(lanes);
  transfers = rings(lanes / 2);
  if (ring_blocks != 0) {
    // From one rank to another: what a link carries in some 10 us.
    const uint32_t chunks = (ranks <= 2 ? 4 << 20 : 2 << 20) / device::kBulkChunk;
    const uint32_t depth = std::bit_floor(chunks / ring_blocks);
    for (RingSet* const set : {&collectives, &results}) {
      set->bulk = table(ring_blocks, depth * device::kBulkChunk);
      set->bulk.depth = depth;
    }
  }
  total = at;
}

}  // namespace ark
