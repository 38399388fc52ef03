// Registered memory: users' memory that all ranks of a group map, so that collectives read and write it in place.
//
// add() and remove() are collective and fail on all ranks or on none. Ranks meet through the store the first time,
// later over the sockets kept from it (memory_meeting.hpp). Each rank offers a range in a segment of its pool
// (shareable_pool.hpp). Ranges have equal size; segments and offsets may differ. A peer's segment is mapped once for
// all its ranges. A window keeps this rank's segment and the peers' mappings until it is removed or the group is
// destroyed. All ranks make the same calls in the same order, one at a time.
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
  std::shared_ptr<const ShareableSegment> segment;  // the segment that contains it; remove() needs none
};

class Registration {
 public:
  // Returns this rank's range. Throws if it has none.
  using Offer = std::function<RegisteredRange()>;
  // Returns the table for new windows on this rank's device, or null on all ranks. Called while all ranks are in one
  // step.
  using Place = std::function<Windows*()>;

  explicit Registration(std::unique_ptr<MemoryMeeting> meeting) : meeting_(std::move(meeting)) {}
  bool over() const { return meeting_->over(); }  // a rank did not arrive or was lost
  void set_timeout(std::chrono::milliseconds timeout) { meeting_->set_timeout(timeout); }

  // Returns the window's id, equal on all ranks; 0 if there is no table for it.
  uint32_t add(const Offer& offer, const Place& place);
  // Adds all ranges or none. Every rank must offer the same number.
  std::vector<uint32_t> add_all(const std::function<std::vector<RegisteredRange>()>& offer, const Place& place);

  // Ends the newest window of that range. `quiet` waits until the device has finished everything that may use it. If it
  // returns false, the memory stays mapped until `windows` is destroyed.
  void remove(const Offer& offer, Windows* windows, const std::function<bool()>& quiet);
  // `ids`: the result of add_all(). Null: this rank has none, which is an error on all ranks.
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
