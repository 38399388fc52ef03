// The memory in which ranks of a group on CUDA devices meet, and where it is.
//
// Each rank's part lies on its GPU, where all of them reach each other's memory and values arrive there
// (peer_test.hpp). Where a pair of them does not, all parts lie in pinned memory of the host, for the whole group:
// chosen alike on all ranks. What is a rank's alone then stays on its GPU, as reading it over the bus would take a
// kernel microseconds.
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

struct ArenaMemory {
  struct Options {
    int rank = 0, size = 1;
    int device = 0;
    bool device_each = true;
    std::chrono::milliseconds timeout{0};
    std::function<void()> check;  // between waits; throws what ends the group
  };

  // Collective. Nothing, and `why`, on all ranks: they cannot share memory. Where peer access lies, memory of the host
  // cannot be had and NCCL would believe the driver, that is an Error on all ranks. `dispatch` becomes what suits the
  // place.
  static std::optional<ArenaMemory> share(KeyValueStore& store, const Options& options, CudaDispatch& dispatch,
                                          std::string& why);

  std::vector<DeviceMemory> parts;  // by rank, as mapped here
  DeviceMemory own;                 // on the host: what is this rank's alone
  bool on_host = false;
  std::string why_on_host;  // empty: asked for
};

// Of a group whose peers do not reach each other's memory, for `ark doctor`.
struct HostUse {
  uint64_t bytes_a_rank;        // of pinned memory
  uint64_t nccl_from, nccl_to;  // all_gathers that NCCL carries
};
HostUse host_use(int ranks, bool by_nccl);

}  // namespace ark
