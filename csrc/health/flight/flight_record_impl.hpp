// Internals of the flight record, shared by its source files only.
//
// A slot is accessed only under its lock. A group's counters are atomics; the record's mutex guards its names, which
// are only read for output.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "health/flight/flight_record.hpp"

namespace ark {

// One word; see flight_record.hpp for the ordering argument and the bound.
class FlightLock {
 public:
  bool lock();  // false: not acquired within the bound
  void unlock() { word_.store(0, std::memory_order_release); }

 private:
  static constexpr int kSpins = 64;
  static constexpr int kRounds = 4096;  // yields; some milliseconds if the holder is stopped
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
  uint64_t retired_at = 0;  // next entry id at that time

  std::atomic<uint64_t> collective[kStages] = {};
  std::atomic<uint64_t> p2p[kStages] = {};

  void reached(Stage stage, const FlightEntry& entry);
};

int64_t flight_now_ns();

}  // namespace ark
