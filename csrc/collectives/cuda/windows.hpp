// The table of registered memory: buffers of this rank that peers have mapped, and the peers' buffers as mapped here.
//
// A window is a range of this rank's memory and its counterparts on all ranks, registered together (registration.hpp).
// Its id is the same on every rank and never reused in the group; addresses and offsets may differ. Only this rank
// knows whether a buffer is in a window, so a kernel must ask its peers whether theirs are in the same one.
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

// The place of a buffer of this rank in a registered range.
struct Window {
  uint32_t id;                                // from 1
  uint64_t offset;                            // of the buffer from the start of its range
  std::array<char*, device::kMaxRanks> base;  // every rank's range, as mapped here
  std::array<char*, device::kMaxRanks> seen;  // this rank's range, as mapped by every rank
};

// Every collective on CUDA tensors calls find(); with nothing registered it is one load. Ranges may overlap: find()
// returns the newest that contains the buffer, the same on ranks that registered alike.
//
// Memory ordering: count_ is written under the mutex and only tells whether to look. A thread that registers memory and
// then tells the issuing thread makes it visible to it. The number of windows affects the choice of algorithm, so ranks
// must register at the same point of their order of collectives. Registration on another thread, concurrent with
// collectives, could deadlock.
class Windows {
 public:
  using Base = std::array<char*, device::kMaxRanks>;

  std::optional<Window> find(const void* data, uint64_t bytes) const {
    if (count_.load(std::memory_order_relaxed) == 0 || bytes == 0) return std::nullopt;
    return look_up(reinterpret_cast<uintptr_t>(data), bytes);
  }

  // base[rank] and seen[rank] of this rank are `begin`. `held` is kept until the window ends.
  void add(uint32_t id, char* begin, uint64_t bytes, const Base& base, const Base& seen, std::shared_ptr<void> held);
  // Removes the window and returns what it held, to keep until the device is done with it; null if there is no such
  // window.
  std::shared_ptr<void> remove(uint32_t id);
  // Keeps what a removed window held, because the device may still use it, as long as the table.
  void keep(std::shared_ptr<void> held);
  // Removes all windows and returns what they held and what was kept.
  std::vector<std::shared_ptr<void>> clear();
  // The newest window of exactly this range; 0: none.
  uint32_t id_of(const void* begin, uint64_t bytes) const;
  uint64_t bytes() const;  // total bytes in windows
  size_t size() const { return count_.load(std::memory_order_relaxed); }

 private:
  struct Entry {
    uintptr_t begin, end;
    uintptr_t reach;  // the furthest end of this and all earlier entries
    uint32_t id;
    Base base, seen;
    std::shared_ptr<void> held;
  };
  std::optional<Window> look_up(uintptr_t data, uint64_t bytes) const;
  void renew_reach();

  mutable std::mutex mutex_;
  std::atomic<size_t> count_{0};
  std::vector<Entry> entries_;  // sorted by begin
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace ark
