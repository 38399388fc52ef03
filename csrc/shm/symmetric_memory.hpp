// A buffer of the same size on every rank's GPU, or on the host beside it, mapped by all ranks of a node.
//
// create() is collective: the ranks meet (memory_meeting.hpp), each allocates, hands its allocation's descriptor to
// every peer, maps the peers' and tells how that went. Memory is zero before its descriptor is handed on, so a peer
// can write as soon as it has mapped it. share() is the second half alone, for memory that exists already.
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
    std::function<void()> check;  // between waits; throws what ends the group
  };

  // Empty and `why` where the devices do not reach each other's memory, or a rank could not allocate.
  static std::vector<DeviceMemory> create(KeyValueStore& store, const Options& options, std::string& why);
  // The same at a meeting that the ranks have joined already, which may share more. `allocated`, if given: whether all
  // ranks had the memory, alike on all.
  static std::vector<DeviceMemory> create(MemoryMeeting& meeting, const Options& options, std::string& why,
                                          bool* allocated = nullptr);

  // In the body of a step that every rank takes: hands this rank's memory to every peer, and each peer's descriptor to
  // `take`.
  static void share(MemoryMeeting& meeting, const DeviceMemory& own,
                    const std::function<void(int peer, UniqueFd fd)>& take);
};

}  // namespace ark
