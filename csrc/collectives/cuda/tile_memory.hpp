// Memory of a group's fused operators on this rank's GPU: control words, places for results, and the failure report.
//
// A result is stored tile by tile at its place (ark_torch/kernels/cuda/fused/tiles.cuh). Each rank chooses its place
// and tells the others in the kernel: registered memory from the caller, a place that a captured graph owns, or the
// staging place, from which the caller copies. All ranks share memory at the first operator and again when a result is
// larger. Ranks cannot meet during capture, so the memory must exist by then. Not thread-safe: the group serialises
// launches.
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
  // Collective. Returns null on all ranks, and sets `why`, if a device has no room.
  static std::unique_ptr<TileMemory> create(CudaCommunicator& communicator, std::string& why);

  struct Place {
    char* data = nullptr;
    std::array<char*, device::kMaxRanks> seen{};  // by each rank
    // Every rank's place of this number, as mapped here; only for the staging place, since others are the ranks' own
    // choice.
    std::array<char*, device::kMaxRanks> peers{};
    std::shared_ptr<void> keep;  // keeps the memory and the place in it
  };

  // Grows the places, collectively, if `bytes` (equal on all ranks) exceeds all earlier sizes. Returns false on all
  // ranks, and sets `why`, if a device has no room. Throws Error(invalid_argument) if it would have to grow during
  // capture.
  bool reserve(CudaCommunicator& communicator, uint64_t bytes, bool capturing, std::string& why);
  uint64_t bytes() const { return bytes_; }  // size of a place
  // A place of that size. One operation uses it at a time, in the group's order.
  Place staging() const;
  // A place for the life of a captured graph, or none if all are taken.
  std::optional<Place> take();

  // Links of one operation that stores at `place`; the caller sets `layout` and `limit_ns`.
  device::TileLinks links(const Place& place) const;
  // What a launch reported, if anything. Later launches have no result either.
  std::optional<device::TileReport> failure() const;

 private:
  TileMemory(const CudaCommunicator& communicator, std::unique_ptr<CudaCommunicator::Shared> control);
  Place place(uint64_t number) const;

  struct Data {
    Data(std::unique_ptr<CudaCommunicator::Shared> memory, size_t places) : shared(std::move(memory)), taken(places) {}
    std::unique_ptr<CudaCommunicator::Shared> shared;
    std::vector<std::atomic<bool>> taken;  // any thread may clear it when a graph ends
  };

  const int rank_, size_;
  const uint64_t most_bytes_;
  std::unique_ptr<CudaCommunicator::Shared> control_;
  PinnedMemory report_;
  std::shared_ptr<Data> data_;
  uint64_t bytes_ = 0;  // size of a place
};

}  // namespace ark
