// Which algorithm carries a collective on CUDA tensors, by measurement: the numbers of CudaDispatch by name.
//
// The defaults were measured (CudaDispatch::measured); ARK_DISPATCH's table (tools.tune --cuda writes one) replaces
// them for the sizes of groups that it names. Ranks must decide alike, so all take rank 0's, told through the store.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "collectives/cuda/cuda_communicator.hpp"
#include "memory/key_value.hpp"

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
};
inline constexpr CudaDispatchField kCudaDispatchFields[] = {
    {"one_shot_to", &CudaDispatch::one_shot_to},           {"chunks_from", &CudaDispatch::chunks_from},
    {"landings_from", &CudaDispatch::landings_from},       {"relay_from", &CudaDispatch::relay_from},
    {"copy_engine_from", &CudaDispatch::copy_engine_from}, {"buffer_bytes", &CudaDispatch::buffer_bytes},
};

CudaDispatch choose_dispatch(const std::vector<CudaRule>& rules, int size);

// Collective: rank 0's choice, on every rank; `buffer_bytes` at most for copy engines. `check` is called between waits
// and throws what ends the group.
CudaDispatch agree_on_dispatch(KeyValueStore& store, int rank, int size, const std::vector<CudaRule>& rules,
                               uint64_t buffer_bytes, const std::function<void()>& check);

}  // namespace ark
