// Registered memory: users' memory that the ranks of a group have mapped, so that collectives read and write it in
// place.
//
// add() and remove() are collective over the group's ranks, and fail on all of them or on none: they meet
// (memory_meeting.hpp), the first time through the store, later over the sockets kept from it. Each rank offers a range
// of bytes in a segment of its pool (shareable_pool.hpp). Ranges are of one size; segments, and places in them, may
// differ. A peer's segment is mapped once, however many ranges lie in it, and unmapped with its last range.
//
// A window holds this rank's segment and the mappings of the peers' until it is removed, or the group is destroyed.
// One call at a time; all ranks make the same calls in the same order.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "collectives/cuda/windows.hpp"
#include "cuda/shareable_pool.hpp"
#include "shm/memory_meeting.hpp"

namespace ark {

struct RegisteredRange {
  char* data;
  uint64_t bytes;
  std::shared_ptr<const ShareableSegment> segment;  // that it lies in; remove() needs none
};

class Registration {
 public:
  // What this rank offers; throws where it cannot.
  using Offer = std::function<RegisteredRange()>;
  // Where windows go, on this rank's device; null on all ranks: nowhere. Asked while all ranks are in the same step.
  using Place = std::function<Windows*()>;

  explicit Registration(std::unique_ptr<MemoryMeeting> meeting) : meeting_(std::move(meeting)) {}
  bool over() const { return meeting_->over(); }  // a rank did not come, or was lost
  void set_timeout(std::chrono::milliseconds timeout) { meeting_->set_timeout(timeout); }

  // The window's id, equal on all ranks; 0 where there is no place for it.
  uint32_t add(const Offer& offer, const Place& place);
  // All or none; every rank has as many.
  std::vector<uint32_t> add_all(const std::function<std::vector<RegisteredRange>()>& offer, const Place& place);

  // Ends a window: the newest of that range. `quiet` waits until the device has ended all that may use it; false: that
  // cannot be known, and then the memory stays mapped until `windows` goes.
  void remove(const Offer& offer, Windows* windows, const std::function<bool()>& quiet);
  // `ids`: what add_all() gave; null: this rank has none, which is an error on all.
  void remove_all(const std::vector<uint32_t>* ids, Windows* windows, const std::function<bool()>& quiet);

 private:
  enum class Verb : uint32_t { add = 1, add_all, remove, remove_all };
  struct Card;
  void say(Verb verb, const std::function<void(Card&)>& fill);
  uint32_t share(const RegisteredRange& own, const Place& place);
  std::shared_ptr<const DeviceMemory> mapped(int peer, uint64_t segment, uint64_t bytes, int device, UniqueFd fd);
  static void end(Windows& windows, uint32_t id, const std::function<bool()>& quiet);

  std::unique_ptr<MemoryMeeting> meeting_;
  uint32_t last_id_ = 0;
  std::map<std::pair<int, uint64_t>, std::weak_ptr<const DeviceMemory>> mapped_;  // by peer and its segment's number
};

}  // namespace ark
