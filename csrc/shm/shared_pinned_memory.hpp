// Host memory that every rank of a node and its GPU read and write: words for communication between streams, hosts and
// kernels of different ranks, which a host can access without driver calls.
//
// Every rank creates a part, a memfd (shared_memory.hpp), maps the peers' parts and registers all with the driver for
// its GPU. A part lives until the last process unmaps it, so a peer may write to it even if its owner is gone. Peers
// see what `prepare` wrote, because the descriptor is handed over afterwards.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/driver.hpp"
#include "shm/memory_meeting.hpp"
#include "shm/shared_memory.hpp"

namespace ark {

class SharedPinnedMemory {
 public:
  // One step of the meeting. Parts of `bytes` each, equal on all ranks, contain zeros except for what `prepare` writes.
  // Returns null on all ranks, and sets `why`, if one has no such memory or its driver refuses it.
  static std::unique_ptr<SharedPinnedMemory> create(MemoryMeeting& meeting, int device, size_t bytes,
                                                    const std::function<void(void* own)>& prepare, std::string& why);
  ~SharedPinnedMemory();  // no device may use it any more
  SharedPinnedMemory(const SharedPinnedMemory&) = delete;
  SharedPinnedMemory& operator=(const SharedPinnedMemory&) = delete;

  // Rank r's part, as this process and as its device see it.
  void* host(int rank) const { return parts_[rank].memory.data(); }
  CUdeviceptr device(int rank) const { return parts_[rank].device; }

 private:
  struct Part {
    SharedMemory memory;
    bool registered = false;
    CUdeviceptr device = 0;
  };

  SharedPinnedMemory(int device, int ranks) : ordinal_(device), parts_(ranks) {}
  void add(Part& part);

  const int ordinal_;
  std::vector<Part> parts_;
};

}  // namespace ark
