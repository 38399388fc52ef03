// How a rank's symmetric memory is divided. Offsets are the same on all ranks of a group.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/bulk.cuh"
#include "cuda/one_shot.cuh"
#include "cuda/ring.cuh"

namespace ark {

inline constexpr uint64_t kMostOneShotBytes = 256 * 1024;

struct RingPlace {
  uint32_t lanes;
  size_t slots, credits, state;
};

inline constexpr uint32_t kMostBulkBlocks = 32;

struct ArenaLayout {
  explicit ArenaLayout(int ranks);

  size_t control;   // device::GroupControl
  size_t one_shot;  // packets: [2][ranks][capacity]
  uint64_t one_shot_capacity;
  RingPlace collectives;
  RingPlace transfers;  // send and recv
  struct {
    size_t slots, arrived, credits, state;
  } bulk;
  size_t scratch;  // [ranks + 1][16] bytes: this rank's word and all ranks' words
  size_t total;
};

inline ArenaLayout::ArenaLayout(int ranks) {
  size_t at = 0;
  auto take = [&](size_t bytes) {
    const size_t here = at;
    at += (bytes + 1023) / 1024 * 1024;
    return here;
  };
  const auto ring = [&](uint32_t lanes) {
    const size_t each = static_cast<size_t>(ranks) * lanes;
    RingPlace place{lanes, 0, 0, 0};
    place.state = take(each * sizeof(device::RingState));
    place.credits = take(each * sizeof(uint64_t));
    place.slots = take(each * device::kRingDepth * device::kSlotBytes);
    return place;
  };
  control = take(sizeof(device::GroupControl));
  scratch = take(16 * (ranks + 1));
  one_shot_capacity = device::one_shot_packets(kMostOneShotBytes);
  one_shot = take(2 * ranks * one_shot_capacity * 16);
  collectives = ring(ranks <= 4 ? 1024 : 256);
  transfers = ring(ranks <= 2 ? 512 : ranks <= 4 ? 256 : 128);
  const size_t each = 2 * static_cast<size_t>(ranks) * kMostBulkBlocks;
  bulk.state = take(each * sizeof(device::BulkState));
  bulk.arrived = take(each * sizeof(uint64_t));
  bulk.credits = take(each * sizeof(uint64_t));
  bulk.slots = take(each * device::kBulkDepth * device::bulk_chunk(ranks));
  total = at;
}

}  // namespace ark
