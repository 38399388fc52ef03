// What was measured, choosing and telling.
#include "collectives/cuda/cuda_dispatch.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <thread>

namespace ark {

namespace {

constexpr char kKey[] = "dispatch";

}  // namespace

CudaDispatch CudaDispatch::measured(int ranks) {
  // Measured on H200 (docs/measurements.md has the figures); what is not: relay_from, more than four ranks. Large sums
  // are taken beside computation, which rings of warps slow down more than what takes few multiprocessors or none: copy
  // engines on two ranks, rings in bulk on four, where copy engines gain from 512 MB on.
  CudaDispatch made;
  if (ranks <= 2) {
    made.one_shot_to = 512 << 10;
    made.part_bytes = 64 << 20;
    made.copy_engine_from = 24 << 20;
    made.in_line_to = 64 << 20;
    made.all_gather_engine_from = 64 << 20;
    made.registered_all_gather_engine_from = 12 << 20;
  } else if (ranks <= 4) {
    made.one_shot_to = 160 << 10;
    made.bulk_from = 24 << 20;
    made.ring_blocks = 24;
    made.part_bytes = 8 << 20;
    made.copy_engine_from = 512 << 20;
  }
  return made;
}

CudaDispatch CudaDispatch::through_host() const {
  CudaDispatch dispatch = *this;
  for (const CudaDispatchField& field : kCudaDispatchFields)
    if (field.on_host) dispatch.*field.value = *field.on_host;
  return dispatch;
}

CudaDispatch choose_dispatch(const std::vector<CudaRule>& rules, int size) {
  for (const CudaRule& rule : rules)
    if (size <= rule.max_ranks) return rule.dispatch;
  return CudaDispatch::measured(size);
}

CudaDispatch agree_on_dispatch(KeyValueStore& store, int rank, int size, const std::vector<CudaRule>& rules,
                               const DispatchLimits& limits, const std::function<void()>& check) {
  constexpr size_t kFields = std::size(kCudaDispatchFields);
  CudaDispatch mine = choose_dispatch(rules, size);
  mine.buffer_bytes = std::min(mine.buffer_bytes, limits.buffer_bytes);
  for (const CudaDispatchField& field : kCudaDispatchFields)
    if (field.fast && !limits.fast) mine.*field.value = CudaDispatch::kNever;
  if (size == 1) return mine;
  std::vector<uint8_t> told(kFields * sizeof(uint64_t));
  if (rank == 0) {
    for (size_t i = 0; i < kFields; ++i)
      std::memcpy(&told[i * sizeof(uint64_t)], &(mine.*kCudaDispatchFields[i].value), sizeof(uint64_t));
    store.set(kKey, told);
    return mine;
  }
  for (;;) {
    if (const auto found = store.find(kKey)) {
      if (found->size() != told.size())
        throw Error(ErrorKind::system, "rank 0 runs another version of ark_torch: its dispatch has " +
                                           std::to_string(found->size()) + " bytes, this rank's " +
                                           std::to_string(told.size()));
      for (size_t i = 0; i < kFields; ++i)
        std::memcpy(&(mine.*kCudaDispatchFields[i].value), &(*found)[i * sizeof(uint64_t)], sizeof(uint64_t));
      return mine;
    }
    check();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace ark
