// Tests whether values arrive in peers' memory. On some machines (translating IOMMUs, virtual machines, some boards
// without NVLink) the driver grants peer access, but written data is lost, arrives wrong or never completes.
//
// Every rank's GPU writes a pattern into every peer's arena, by kernel stores and, if the group uses copy engines, by
// copies; then every rank compares what arrived. It takes milliseconds, once per pair of devices in a process. All
// waits are bounded: exceeding `patience` is a verdict too. The kernel first runs on the device's own memory, so that a
// busy device does not look broken.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "collectives/cuda/arena.hpp"
#include "cuda/device_memory.hpp"
#include "shm/memory_meeting.hpp"

namespace ark {

struct PeerTest {
  int device = 0;
  const ArenaLayout* layout = nullptr;
  const std::vector<DeviceMemory>* memory = nullptr;  // every rank's arena as mapped here
  bool copies = false;                                // copy engines are in use; must be equal on all ranks
  std::chrono::milliseconds patience{10000};          // for writes to a peer's memory
  std::chrono::milliseconds timeout{600000};          // for a device that is busy with other work
  std::function<void()> check;                        // called between waits; throws what ends the group

  // Call it before ranks meet, so that a missing compiler is an Error on this rank alone.
  static void load_kernel(int device);
  // Collective. Returns false on all ranks, and sets `why`, if values do not arrive between some pair.
  bool passes(MemoryMeeting& meeting, std::string& why) const;
};

// Returns true if the device never finished a test's work. Then no thread may wait for it.
bool is_stuck(int device);

}  // namespace ark
