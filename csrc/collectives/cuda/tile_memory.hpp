// What the fused operators of a group have on this rank's GPU: control words, places for results, the report.
//
// A result is stored tile by tile at its place (ark_torch/kernels/cuda/fused/tiles.cuh). Which place that is, each rank
// decides for itself and tells the others in the kernel: registered memory that the caller allocated, a place of a
// captured graph's own, or the staging place, from which the caller copies. Memory is shared at the first operator and
// again when a larger result comes, by all ranks together; under capture ranks cannot meet, so there it must be there.
//
// Not thread-safe: called by launches, which the group holds apart.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/cuda/cuda_communicator.hpp"
#include "cuda/device_memory.hpp"
#include "cuda/fused/tiles.cuh"

namespace ark {

class TileMemory {
 public:
  // Collective. Null, and `why`, alike on all ranks: a device has no room.
  static std::unique_ptr<TileMemory> create(CudaCommunicator& communicator, std::string& why);

  struct Place {
    char* data = nullptr;
    std::array<char*, device::kMaxRanks> seen{};  // by each rank
    // Every rank's place of this number, as mapped here. Of the staging place alone: what others take, only they know.
    std::array<char*, device::kMaxRanks> peers{};
    std::shared_ptr<void> keep;  // memory, and the place in it, are the holder's as long as this lives
  };

  // Collective, where `bytes` (alike on all ranks) are more than ever before; else does nothing. False, and `why`,
  // alike on all ranks: a device has no room. Error(invalid_argument) under capture where there is something to do.
  bool reserve(CudaCommunicator& communicator, uint64_t bytes, bool capturing, std::string& why);
  uint64_t bytes() const { return bytes_; }  // that are reserved
  // Of that size. It is used by one operation at a time, in the order of the group's.
  Place staging() const;
  // For the life of a captured graph; none: they are all taken.
  std::optional<Place> take();

  // Of one operation that stores at `place`; the caller sets `layout` and `limit_ns`.
  device::TileLinks links(const Place& place) const;
  // What a launch reported; none: nothing. Whatever was launched since has no result either.
  std::optional<device::TileReport> failure() const;

 private:
  TileMemory(const CudaCommunicator& communicator, std::unique_ptr<CudaCommunicator::Shared> control);
  Place place(uint64_t number) const;

  struct Data {
    Data(std::unique_ptr<CudaCommunicator::Shared> memory, size_t places) : shared(std::move(memory)), taken(places) {}
    std::unique_ptr<CudaCommunicator::Shared> shared;
    std::vector<std::atomic<bool>> taken;  // a graph's end gives its place back, on any thread
  };

  const int rank_, size_;
  const uint64_t most_bytes_;
  std::unique_ptr<CudaCommunicator::Shared> control_;
  PinnedMemory report_;
  std::shared_ptr<Data> data_;
  uint64_t bytes_ = 0;  // of a place
};

}  // namespace ark
