// A buffer of the same size on every rank's GPU, mapped by all ranks of a node.
//
// create() is collective. It meets the ranks once more through the store (bootstrap.hpp), which gives a socket and a
// page of shared memory for every pair; each rank allocates, hands its allocation's descriptor to every peer over the
// socket, maps the peers' and publishes how that went. Memory is zero before its descriptor is handed on, so a peer
// can write as soon as it has mapped it. One rank's failure is an answer that all ranks get, with its words.
//
// Ordering. A page's text and numbers are written before its stage grows (release); readers acquire the stage.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "health/group_health.hpp"
#include "memory/device_memory.hpp"
#include "memory/key_value.hpp"

namespace ark {

class SymmetricMemory {
 public:
  struct Options {
    int rank = 0;
    int size = 1;
    int device = 0;
    size_t bytes = 0;  // equal on all ranks
    std::chrono::milliseconds timeout{0};
    std::string name;                                  // of this buffer in the group; part of its keys in the store
    std::function<void(const DeviceMemory&)> prepare;  // this rank's, before a peer sees it; may be empty
    std::function<void()> check;                       // between waits; throws what ends the group
  };

  // Empty and `why` where the devices do not reach each other's memory, or a rank could not allocate.
  static std::vector<DeviceMemory> create(KeyValueStore& store, const Options& options, std::string& why);
};

}  // namespace ark
