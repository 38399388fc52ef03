// The ring of operations, and the groups with their progress. flight_record_json.cpp writes the output; the header
// lists the invariants.
#include "health/flight/flight_record.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <thread>

#include "health/flight/flight_record_impl.hpp"

namespace ark {

namespace {

// Keeps the maximum, because threads of a group may report out of order.
void raise_to(std::atomic<uint64_t>& counter, uint64_t value) {
  uint64_t seen = counter.load(std::memory_order_relaxed);
  while (seen < value && !counter.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

int64_t flight_now_ns() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

FlightSizes& FlightSizes::operator=(const FlightSizes& other) {
  stored_ = other.stored_;
  truncated_ = other.truncated_;
  dims_ = other.dims_;
  total_ = other.total_;
  for (int tensor = 0; tensor < stored_; ++tensor) {
    std::copy_n(other.sizes_[tensor], dims_[tensor], sizes_[tensor]);
  }
  return *this;
}

void FlightSizes::add(const int64_t* dims, size_t count) {
  ++total_;
  if (stored_ == kTensors) {
    truncated_ = true;
    return;
  }
  const size_t kept = std::min<size_t>(count, kDims);
  std::copy_n(dims, kept, sizes_[stored_]);
  for (size_t dim = kept; dim < count; ++dim) {
    sizes_[stored_][kDims - 1] *= dims[dim];
    truncated_ = true;
  }
  dims_[stored_++] = static_cast<uint8_t>(kept);
}

bool FlightLock::lock() {
  // Practically uncontended: threads only meet if one laps the whole ring or a dump is read.
  for (int round = 0; round < kRounds; ++round) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (word_.load(std::memory_order_relaxed) == 0 && word_.exchange(1, std::memory_order_acquire) == 0) return true;
    }
    std::this_thread::yield();
  }
  return false;
}

FlightRecord& FlightRecord::instance() {
  static FlightRecord* record = new FlightRecord();  // never destroyed: see the header
  return *record;
}

FlightRecord::FlightRecord(size_t capacity) {
  resize(capacity);
}

FlightRecord::~FlightRecord() {
  for (int chunk = 0; chunk < kChunks; ++chunk) delete[] chunks_[chunk].load(std::memory_order_relaxed);
}

void FlightRecord::resize(size_t capacity) {
  constexpr size_t kMax = size_t{1} << 20;
  const size_t rounded = capacity == 0 ? 0 : std::bit_ceil(std::min(capacity, kMax));
  std::lock_guard guard(mutex_);
  const Ring* current = ring_.load(std::memory_order_relaxed);
  if ((current ? current->mask + 1 : 0) == rounded) return;
  if (rounded == 0) {
    ring_.store(nullptr, std::memory_order_release);
    return;
  }
  rings_.push_back(std::make_unique<Ring>(rounded));
  ring_.store(rings_.back().get(), std::memory_order_release);
}

size_t FlightRecord::capacity() const {
  const Ring* ring = ring_.load(std::memory_order_acquire);
  return ring ? ring->mask + 1 : 0;
}

uint64_t FlightRecord::scheduled(const FlightEntry& entry) {
  Ring* ring = ring_.load(std::memory_order_acquire);
  if (ring == nullptr) return 0;
  const uint64_t id = next_id_.fetch_add(1, std::memory_order_relaxed);
  Slot& slot = ring->slots[id & ring->mask];
  const int64_t now = flight_now_ns();
  if (!slot.lock.lock()) {
    dropped_.fetch_add(1, std::memory_order_relaxed);
    return 0;
  }
  if (slot.entry.id < id) {  // otherwise this thread was lapped by a whole ring, and the newer entry stays
    slot.entry = entry;
    slot.entry.id = id;
    slot.entry.created_ns = now;
    slot.entry.started_ns = entry.state == FlightState::scheduled ? 0 : now;
    slot.entry.ended_ns = 0;
    slot.error[0] = '\0';
  }
  slot.lock.unlock();
  if (Group* owner = group(entry.group)) {
    owner->reached(Group::kScheduled, entry);
    if (entry.state != FlightState::scheduled) owner->reached(Group::kStarted, entry);
  }
  return id;
}

template <typename Change>
void FlightRecord::update(uint64_t id, Change change) {
  Ring* ring = ring_.load(std::memory_order_acquire);
  if (id == 0 || ring == nullptr) return;
  Slot& slot = ring->slots[id & ring->mask];
  if (!slot.lock.lock()) {
    dropped_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  if (slot.entry.id == id) change(slot);
  slot.lock.unlock();
}

void FlightRecord::started(uint64_t id) {
  const int64_t now = flight_now_ns();
  update(id, [&](Slot& slot) {
    if (slot.entry.state != FlightState::scheduled) return;
    slot.entry.state = FlightState::started;
    slot.entry.started_ns = now;
    if (Group* owner = group(slot.entry.group)) owner->reached(Group::kStarted, slot.entry);
  });
}

void FlightRecord::completed(uint64_t id) {
  const int64_t now = flight_now_ns();
  update(id, [&](Slot& slot) {
    if (slot.entry.state == FlightState::failed) return;
    slot.entry.state = FlightState::completed;
    slot.entry.ended_ns = now;
    if (slot.entry.started_ns == 0) slot.entry.started_ns = now;
    if (Group* owner = group(slot.entry.group)) owner->reached(Group::kCompleted, slot.entry);
  });
}

void FlightRecord::started_on_device(uint64_t id, int64_t started_ns) {
  update(id, [&](Slot& slot) {
    if (slot.entry.state != FlightState::scheduled) return;
    slot.entry.state = FlightState::started;
    slot.entry.started_ns = std::max(started_ns, slot.entry.created_ns);
    if (Group* owner = group(slot.entry.group)) owner->reached(Group::kStarted, slot.entry);
  });
}

void FlightRecord::completed_on_device(uint64_t id, int64_t started_ns, int64_t ended_ns) {
  const int64_t now = flight_now_ns();
  update(id, [&](Slot& slot) {
    FlightEntry& entry = slot.entry;
    if (entry.state == FlightState::failed) return;
    entry.state = FlightState::completed;
    // The two clocks agree only to some microseconds, so clamp: an operation never begins before it was issued.
    const bool timed = started_ns != 0 && ended_ns != 0;
    const int64_t late = timed ? std::max<int64_t>(0, entry.created_ns - started_ns) : 0;
    entry.started_ns = timed ? started_ns + late : 0;
    entry.ended_ns = timed ? ended_ns + late : now;
    if (Group* owner = group(entry.group)) {
      owner->reached(Group::kStarted, entry);
      owner->reached(Group::kCompleted, entry);
    }
  });
}

void FlightRecord::failed(uint64_t id, std::string_view error) {
  const int64_t now = flight_now_ns();
  update(id, [&](Slot& slot) {
    if (slot.entry.state == FlightState::completed) return;
    slot.entry.state = FlightState::failed;
    slot.entry.ended_ns = now;
    size_t length = std::min(error.size(), kErrorBytes - 1);
    // Never cut inside a UTF-8 character.
    while (length > 0 && length < error.size() && (static_cast<unsigned char>(error[length]) & 0xC0) == 0x80) --length;
    std::memcpy(slot.error, error.data(), length);
    slot.error[length] = '\0';
  });
}

std::vector<FlightEntry> FlightRecord::snapshot(std::vector<std::string>* errors) const {
  std::vector<std::pair<FlightEntry, std::string>> found;
  if (Ring* ring = ring_.load(std::memory_order_acquire)) {
    found.reserve(ring->mask + 1);
    for (size_t index = 0; index <= ring->mask; ++index) {
      Slot& slot = ring->slots[index];
      if (!slot.lock.lock()) continue;
      if (slot.entry.id != 0) found.emplace_back(slot.entry, slot.error);
      slot.lock.unlock();
    }
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first.id < b.first.id; });
  std::vector<FlightEntry> entries;
  entries.reserve(found.size());
  if (errors) errors->clear();
  for (auto& [entry, error] : found) {
    entries.push_back(entry);
    if (errors) errors->push_back(std::move(error));
  }
  return entries;
}

// Groups are stored in chunks that are never moved or freed, so an operation finds its group without a lock while
// another thread registers one. A release store publishes a new chunk. A retired group's entry is reused once its last
// operation has left the ring.
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
  // A retired group whose last operation was overwritten is free, so a program that creates groups in a loop does not
  // grow.
  while (id < groups_ && !(group(id)->retired && group(id)->retired_at + capacity() < next)) ++id;
  if (id == groups_) {
    const uint32_t shifted = id + kFirstChunk;
    const int chunk = std::bit_width(shifted) - std::bit_width(kFirstChunk);
    if (chunk >= kChunks) return 0;  // 67 million live groups: keep recording, without a group
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
