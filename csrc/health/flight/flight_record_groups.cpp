// The flight record's groups: who they are, and how far each has come.
//
// Groups lie in chunks that are never moved or freed, so that an operation finds its group without a lock while another
// thread registers one: a chunk is published by a release store once it is made. A retired group's place is taken again
// when its last entry has left the ring.
#include <algorithm>
#include <bit>

#include "health/flight/flight_record.hpp"
#include "health/flight/flight_record_impl.hpp"

namespace ark {

namespace {

// Keeps the maximum: threads of one group may report out of order.
void raise_to(std::atomic<uint64_t>& counter, uint64_t value) {
  uint64_t seen = counter.load(std::memory_order_relaxed);
  while (seen < value && !counter.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

void FlightRecord::Group::reached(Stage stage, const FlightEntry& entry) {
  raise_to((entry.is_p2p ? p2p : collective)[stage], entry.is_p2p ? entry.p2p_sequence : entry.sequence);
}

FlightRecord::Group* FlightRecord::group(uint32_t id) const {
  const uint32_t shifted = id + kFirstChunk;
  const int chunk = std::bit_width(shifted) - std::bit_width(kFirstChunk);
  if (chunk >= kChunks) return nullptr;
  Group* groups = chunks_[chunk].load(std::memory_order_acquire);
  return groups ? groups + (shifted - (kFirstChunk << chunk)) : nullptr;
}

uint32_t FlightRecord::register_group(std::string_view name, std::string_view description, int rank, int size,
                                      const std::vector<int>& global_ranks) {
  if (size >= world_size_.load(std::memory_order_relaxed)) {
    const bool known = rank >= 0 && static_cast<size_t>(rank) < global_ranks.size();
    set_global_rank(known ? global_ranks[static_cast<size_t>(rank)] : rank, size);
  }
  std::lock_guard guard(mutex_);
  const uint64_t next = next_id_.load(std::memory_order_relaxed);
  uint32_t id = 1;
  // A retired group whose last entry has been overwritten is free: programs that make groups in a loop stay flat.
  while (id < groups_ && !(group(id)->retired && group(id)->retired_at + capacity() < next)) ++id;
  if (id == groups_) {
    const uint32_t shifted = id + kFirstChunk;
    const int chunk = std::bit_width(shifted) - std::bit_width(kFirstChunk);
    if (chunk >= kChunks) return 0;  // 67 million live groups: keep recording, under no name
    if (chunks_[chunk].load(std::memory_order_relaxed) == nullptr) {
      chunks_[chunk].store(new Group[size_t{kFirstChunk} << chunk], std::memory_order_release);
    }
    ++groups_;
  }
  Group& entry = *group(id);
  entry.name = name;
  entry.description = description;
  entry.rank = rank;
  entry.size = size;
  entry.global_ranks = global_ranks;
  for (int member = 0; global_ranks.empty() && member < size; ++member) entry.global_ranks.push_back(member);
  entry.retired = false;
  for (auto* counters : {&entry.collective, &entry.p2p}) {
    for (auto& counter : *counters) counter.store(0, std::memory_order_relaxed);
  }
  return id;
}

void FlightRecord::describe_group(uint32_t id, std::string_view name, std::string_view description) {
  std::lock_guard guard(mutex_);
  if (id == 0 || id >= groups_) return;
  group(id)->name = name;
  group(id)->description = description;
}

void FlightRecord::retire_group(uint32_t id) {
  std::lock_guard guard(mutex_);
  if (id == 0 || id >= groups_) return;
  Group& entry = *group(id);
  entry.retired = true;
  entry.retired_at = next_id_.load(std::memory_order_relaxed);
}

void FlightRecord::set_global_rank(int rank, int world_size) {
  global_rank_.store(rank, std::memory_order_relaxed);
  world_size_.store(world_size, std::memory_order_relaxed);
}

}  // namespace ark
