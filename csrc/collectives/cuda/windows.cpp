// Looks up windows: entries sorted by begin, each with the furthest end of it and all entries before it.
#include "collectives/cuda/windows.hpp"

#include <algorithm>

namespace ark {

void Windows::add(uint32_t id, char* begin, uint64_t bytes, const Base& base, const Base& seen,
                  std::shared_ptr<void> held) {
  const auto from = reinterpret_cast<uintptr_t>(begin);
  const std::lock_guard lock(mutex_);
  const auto behind = std::upper_bound(entries_.begin(), entries_.end(), from,
                                       [](uintptr_t at, const Entry& entry) { return at < entry.begin; });
  entries_.insert(behind, Entry{from, from + bytes, 0, id, base, seen, std::move(held)});
  renew_reach();
}

std::shared_ptr<void> Windows::remove(uint32_t id) {
  const std::lock_guard lock(mutex_);
  const auto found =
      std::find_if(entries_.begin(), entries_.end(), [id](const Entry& entry) { return entry.id == id; });
  if (found == entries_.end()) return nullptr;
  std::shared_ptr<void> held = std::move(found->held);
  entries_.erase(found);
  renew_reach();
  return held;
}

void Windows::keep(std::shared_ptr<void> held) {
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::move(held));
}

std::vector<std::shared_ptr<void>> Windows::clear() {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<void>> held = std::move(kept_);
  kept_.clear();
  for (Entry& entry : entries_) held.push_back(std::move(entry.held));
  entries_.clear();
  renew_reach();
  return held;
}

uint32_t Windows::id_of(const void* begin, uint64_t bytes) const {
  const auto from = reinterpret_cast<uintptr_t>(begin);
  const std::lock_guard lock(mutex_);
  uint32_t newest = 0;
  for (const Entry& entry : entries_)
    if (entry.begin == from && entry.end == from + bytes) newest = std::max(newest, entry.id);
  return newest;
}

uint64_t Windows::bytes() const {
  const std::lock_guard lock(mutex_);
  uint64_t sum = 0;
  uintptr_t reach = 0;
  for (const Entry& entry : entries_) {
    if (entry.reach > reach) sum += entry.reach - std::max(reach, entry.begin);
    reach = entry.reach;
  }
  return sum;
}

std::optional<Window> Windows::look_up(uintptr_t data, uint64_t bytes) const {
  const uintptr_t end = data + bytes;
  const std::lock_guard lock(mutex_);
  auto behind = std::upper_bound(entries_.begin(), entries_.end(), data,
                                 [](uintptr_t at, const Entry& entry) { return at < entry.begin; });
  const Entry* best = nullptr;
  while (behind != entries_.begin()) {
    --behind;
    if (behind->reach < end) break;  // neither this entry nor any before it reaches `end`
    if (behind->end >= end && (best == nullptr || behind->id > best->id)) best = &*behind;
  }
  if (best == nullptr) return std::nullopt;
  return Window{best->id, data - best->begin, best->base, best->seen};
}

void Windows::renew_reach() {
  uintptr_t reach = 0;
  for (Entry& entry : entries_) entry.reach = reach = std::max(reach, entry.end);
  count_.store(entries_.size(), std::memory_order_relaxed);
}

}  // namespace ark
