// Host memory that every rank of a node and its GPU read and write: words by which streams, hosts and kernels of
// different ranks talk, and which a host reaches without a call of the driver.
//
// Every rank makes a part of its own, a memfd (shared_memory.hpp), maps the peers' parts and registers all of them with
// the driver for its GPU: each process its own mapping of the same pages. A part lives until the last process that has
// mapped it has let go of it, so a peer may write to it whatever became of its owner. What a rank has written into its
// part in `prepare` is there when a peer first sees it: the descriptor is handed over behind it.
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
  // One step of the meeting: parts of `bytes` each, equal on all ranks; zero but for what `prepare` writes. Null, and
  // `why`, on all ranks where one of them has no such memory or its driver refuses it.
  static std::unique_ptr<SharedPinnedMemory> create(MemoryMeeting& meeting, int device, size_t bytes,
                                                    const std::function<void(void* own)>& prepare, std::string& why);
  ~SharedPinnedMemory();  // no device may use it any more
  SharedPinnedMemory(const SharedPinnedMemory&) = delete;
  SharedPinnedMemory& operator=(const SharedPinnedMemory&) = delete;

  // Rank r's part, as this process sees it and as its device does.
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
