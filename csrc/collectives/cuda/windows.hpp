// Where registered memory lies: which buffers of this rank the group's peers have mapped, and theirs as mapped here.
//
// A window is a range of this rank's memory with its counterparts on all ranks, registered by all of them together
// (registration.hpp). Its id is the same on every rank and never used again in the group; addresses and the ranges'
// places in their allocations may differ. Whether a buffer lies in a window is this rank's knowledge alone: a kernel
// must find out from the peers whether theirs lie in the same one.
//
// find() is called for every collective on CUDA tensors: with nothing registered it is one load. Ranges may overlap;
// of those that hold the buffer it takes the newest, alike on ranks that registered alike.
//
// Ordering. count_ is written under the mutex and only tells whether to look at all: who has registered memory, and
// told the thread that issues so, is seen by it. How many there are decides which way operations take, so ranks must
// register in the same place of the order of collectives; beside them on another thread, ranks would wait for each
// other.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cuda/packet.cuh"

namespace ark {

// Where a buffer of this rank lies in a registered range.
struct Window {
  uint32_t id;                                // from 1
  uint64_t offset;                            // of the buffer from the start of its range
  std::array<char*, device::kMaxRanks> base;  // of every rank's range, as mapped here; own included
  std::array<char*, device::kMaxRanks> seen;  // of this rank's range, as mapped by every rank; own included
};

class Windows {
 public:
  using Base = std::array<char*, device::kMaxRanks>;

  std::optional<Window> find(const void* data, uint64_t bytes) const {
    if (count_.load(std::memory_order_relaxed) == 0 || bytes == 0) return std::nullopt;
    return look_up(reinterpret_cast<uintptr_t>(data), bytes);
  }

  // base[rank] and seen[rank] of this rank are `begin`. `held` is kept until the window ends.
  void add(uint32_t id, char* begin, uint64_t bytes, const Base& base, const Base& seen, std::shared_ptr<void> held);
  // No operation finds it any more; what was held, for whoever waits until the device is done with it. Null: no such.
  std::shared_ptr<void> remove(uint32_t id);
  // Of a removed window, what the device may still use: kept as long as the table.
  void keep(std::shared_ptr<void> held);
  // All of them, and what was kept.
  std::vector<std::shared_ptr<void>> clear();
  // The newest window of exactly this range; 0: none.
  uint32_t id_of(const void* begin, uint64_t bytes) const;
  uint64_t bytes() const;  // of this rank's memory in windows, however many
  size_t size() const { return count_.load(std::memory_order_relaxed); }

 private:
  struct Entry {
    uintptr_t begin, end;
    uintptr_t reach;  // the furthest end of this and all entries before
    uint32_t id;
    Base base, seen;
    std::shared_ptr<void> held;
  };
  std::optional<Window> look_up(uintptr_t data, uint64_t bytes) const;
  void renew_reach();

  mutable std::mutex mutex_;
  std::atomic<size_t> count_{0};
  std::vector<Entry> entries_;  // by begin
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace ark
