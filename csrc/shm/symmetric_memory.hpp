// A buffer of equal size on every rank's GPU, or on the host near it, mapped by all ranks of a node.
//
// create() is collective: the ranks meet (memory_meeting.hpp), allocate, pass their allocation's descriptor to every
// peer, map the peers' and report the result. Memory is zeroed before its descriptor is passed on, so a peer may write
// as soon as it has mapped it. share() is only the second half, for existing memory.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cuda/device_memory.hpp"
#include "health/group_health.hpp"
#include "shm/key_value.hpp"
#include "shm/memory_meeting.hpp"

namespace ark {

class SymmetricMemory {
 public:
  struct Options {
    int rank = 0;
    int size = 1;
    int device = 0;
    size_t bytes = 0;         // equal on all ranks
    bool device_each = true;  // refuses ranks that share a device
    bool on_host = false;     // for devices that do not reach each other's memory
    std::chrono::milliseconds timeout{0};
    std::string name;             // of this buffer in the group; part of its keys in the store
    std::function<void()> check;  // called between waits; throws what ends the group
  };

  // Returns an empty vector, and sets `why`, if devices do not reach each other's memory or a rank could not allocate.
  static std::vector<DeviceMemory> create(KeyValueStore& store, const Options& options, std::string& why);
  // The same in an existing meeting, which may share more. `allocated`, if given, tells whether all ranks had the
  // memory, equal on all ranks.
  static std::vector<DeviceMemory> create(MemoryMeeting& meeting, const Options& options, std::string& why,
                                          bool* allocated = nullptr);

  // Call it in the body of a step on every rank: passes this rank's memory to every peer, and each peer's descriptor to
  // `take`.
  static void share(MemoryMeeting& meeting, const DeviceMemory& own,
                    const std::function<void(int peer, UniqueFd fd)>& take);
};

}  // namespace ark
