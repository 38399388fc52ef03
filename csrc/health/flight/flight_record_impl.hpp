// Inside of the flight record, shared by its source files only.
//
// A slot is written and read under its lock alone; a group's counters are atomics, its names are guarded by the
// record's mutex (they are read on output only).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "health/flight/flight_record.hpp"

namespace ark {

// One word; see the header of flight_record.hpp for the ordering argument and the bound.
class FlightLock {
 public:
  bool lock();  // false: not had within the bound
  void unlock() { word_.store(0, std::memory_order_release); }

 private:
  static constexpr int kSpins = 64;
  static constexpr int kRounds = 4096;  // yields; some milliseconds when the holder is stopped
  std::atomic<uint32_t> word_{0};
};

struct alignas(64) FlightRecord::Slot {
  FlightLock lock;
  FlightEntry entry;
  char error[kErrorBytes] = {};
};

struct FlightRecord::Ring {
  explicit Ring(size_t capacity) : mask(capacity - 1), slots(std::make_unique<Slot[]>(capacity)) {}
  const size_t mask;
  const std::unique_ptr<Slot[]> slots;
};

struct FlightRecord::Group {
  enum Stage { kScheduled = 0, kStarted = 1, kCompleted = 2, kStages = 3 };

  std::string name;
  std::string description;
  int rank = -1;
  int size = 0;
  std::vector<int> global_ranks;
  bool retired = false;
  uint64_t retired_at = 0;  // next entry id then

  std::atomic<uint64_t> collective[kStages] = {};
  std::atomic<uint64_t> p2p[kStages] = {};

  void reached(Stage stage, const FlightEntry& entry);
};

int64_t flight_now_ns();

}  // namespace ark
