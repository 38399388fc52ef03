// Whether values arrive in peers' memory: on some machines (an IOMMU that translates, virtual machines, some boards
// without NVLink) the driver grants peer access, and what is written is lost, arrives wrong, or never ends.
//
// A test of values, not of flags. Every rank's GPU writes a pattern into every peer's arena, by stores of a kernel and,
// where the group has copy engines copy, by a copy; then all meet, and every rank compares what came. It takes a few
// milliseconds, once for each pair of devices in a process: later groups of the same devices know the verdict. All
// waits are bounded: what a device has not done to a peer's memory after `patience` is a verdict, too. The same kernel
// runs on memory of the device itself first, so that a device that is busy with other work is not taken for a liar.
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
  bool copies = false;                                // copy engines carry something; alike on all ranks
  std::chrono::milliseconds patience{10000};          // for what a device does to a peer's memory
  std::chrono::milliseconds timeout{600000};          // for a device that is busy with other work
  std::function<void()> check;                        // between waits; throws what ends the group

  // Before ranks meet: without a compiler there is no verdict, and an Error on this rank alone.
  static void load_kernel(int device);
  // Collective: steps of the meeting. False, and `why`, on all ranks: some pair's values do not arrive.
  bool passes(MemoryMeeting& meeting, std::string& why) const;
};

// A device of this process that has not ended what a test gave it: nobody must wait for it.
bool is_stuck(int device);

}  // namespace ark
