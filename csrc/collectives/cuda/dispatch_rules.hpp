// Which algorithm carries a collective on CUDA tensors, by measurement: the numbers of CudaDispatch by name.
//
// The defaults were measured (CudaDispatch::measured); ARK_DISPATCH's table (tools.tune --cuda writes one) replaces
// them for the sizes of groups that it names. Ranks must decide alike, so all take rank 0's, told through the store.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "collectives/cuda/cuda_communicator.hpp"
#include "shm/key_value.hpp"

namespace ark {

// A rule applies to groups of up to so many ranks; the first that does decides.
struct CudaRule {
  int max_ranks;
  CudaDispatch dispatch;
};

// The fields of CudaDispatch that a table sets. A new algorithm adds its own here.
struct CudaDispatchField {
  const char* name;
  uint64_t CudaDispatch::*value;
  bool fast = false;  // counts under Options::reduction "fast" alone: what it names does not add in rank order
};
inline constexpr CudaDispatchField kCudaDispatchFields[] = {
    {"one_shot_to", &CudaDispatch::one_shot_to},
    {"chunks_from", &CudaDispatch::chunks_from},
    {"landings_from", &CudaDispatch::landings_from},
    {"relay_from", &CudaDispatch::relay_from},
    {"bulk_from", &CudaDispatch::bulk_from},
    {"ring_blocks", &CudaDispatch::ring_blocks},
    {"part_bytes", &CudaDispatch::part_bytes},
    {"copy_engine_from", &CudaDispatch::copy_engine_from},
    {"in_line_to", &CudaDispatch::in_line_to},
    {"reduce_scatter_engine_from", &CudaDispatch::reduce_scatter_engine_from},
    {"registered_all_gather_engine_from", &CudaDispatch::registered_all_gather_engine_from},
    {"all_gather_engine_from", &CudaDispatch::all_gather_engine_from},
    {"broadcast_engine_from", &CudaDispatch::broadcast_engine_from},
    {"all_to_all_engine_from", &CudaDispatch::all_to_all_engine_from},
    {"buffer_bytes", &CudaDispatch::buffer_bytes},
    {"nccl_all_reduce_from", &CudaDispatch::nccl_all_reduce_from, true},
    {"nccl_reduce_from", &CudaDispatch::nccl_reduce_from, true},
    {"nccl_reduce_scatter_from", &CudaDispatch::nccl_reduce_scatter_from, true},
    {"nccl_all_gather_from", &CudaDispatch::nccl_all_gather_from},
    {"nccl_broadcast_from", &CudaDispatch::nccl_broadcast_from},
    {"nccl_all_to_all_from", &CudaDispatch::nccl_all_to_all_from},
};

CudaDispatch choose_dispatch(const std::vector<CudaRule>& rules, int size);

struct DispatchLimits {
  uint64_t buffer_bytes;  // for copy engines, at most
  bool fast = false;      // sums may be added in any order
};

// Collective: rank 0's choice within its limits, on every rank. `check` is called between waits and throws what ends
// the group.
CudaDispatch agree_on_dispatch(KeyValueStore& store, int rank, int size, const std::vector<CudaRule>& rules,
                               const DispatchLimits& limits, const std::function<void()>& check);

}  // namespace ark
