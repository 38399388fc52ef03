// The shared memory of a group on CUDA devices, and where it is.
//
// If all GPUs reach each other's memory and values arrive there (peer_test.hpp), each rank's part is on its GPU. If any
// pair fails, all parts are in pinned host memory; all ranks decide the same way. Data that is private to a rank then
// stays on its GPU, because reading it over the bus would cost a kernel microseconds.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/cuda/arena.hpp"
#include "collectives/cuda/cuda_dispatch.hpp"
#include "cuda/device_memory.hpp"
#include "shm/key_value.hpp"

namespace ark {

// The blocks of each set of bulk rings that this dispatch uses.
BulkBlocks bulk_blocks_of(const CudaDispatch& dispatch);

struct ArenaMemory {
  struct Options {
    int rank = 0, size = 1;
    int device = 0;
    bool device_each = true;
    std::chrono::milliseconds timeout{0};
    std::function<void()> check;  // called between waits; throws what ends the group
  };

  // Collective. Returns nothing on all ranks, and sets `why`, if they cannot share memory. Throws on all ranks if the
  // driver reports peer access wrongly, host memory is unavailable and NCCL would trust the driver. Adapts `dispatch`
  // to the place.
  static std::optional<ArenaMemory> share(KeyValueStore& store, const Options& options, CudaDispatch& dispatch,
                                          std::string& why);

  std::vector<DeviceMemory> parts;  // by rank, as mapped here
  DeviceMemory own;                 // with the arena on the host: this rank's private data
  bool on_host = false;
  std::string why_on_host;  // empty: requested by the user
};

// What a group without peer access uses, for `ark doctor`.
struct HostUse {
  uint64_t bytes_a_rank;        // pinned memory per rank
  uint64_t nccl_from, nccl_to;  // sizes of all_gathers that NCCL carries
};
HostUse host_use(int ranks, bool by_nccl);

}  // namespace ark
