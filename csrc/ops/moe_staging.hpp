// The group's staging place (collectives/cuda/tile_memory.hpp) as mixtures of experts use it: first the block of the
// experts' rows, then the slots of returning rows.
#pragma once

#include <c10/util/FunctionRef.h>

#include "ops/moe.hpp"
#include "ops/tile_result.hpp"

namespace ark::ops {

// The layout of the staging place, equal on all ranks.
struct MoeBlocks {
  uint64_t rows, slots;  // in bytes
  MoeBlocks(uint64_t row_bytes, int64_t max_rows, int64_t max_tokens, int64_t k);
};

// The context of one operation in the staging place. links(): links to a place at that offset.
struct MoeStaged {
  CudaCommunicator& communicator;
  const TileMemory& tiles;
  TileMemory::Place place;
  CUstream stream;
  uint64_t limit_ns;

  device::TileLinks links(uint64_t offset, uint64_t layout) const;
};

// Launches in the staging place. Returns false if the rows must be moved otherwise.
bool moe_staged(ProcessGroupArk& group, const char* name, c10::Device device, const MoeBlocks& blocks,
                c10::function_ref<void(const MoeStaged&)> launch);

uint64_t moe_fingerprint(std::initializer_list<int64_t> values);

inline uint64_t row_bytes_of(const at::Tensor& rows) {
  return static_cast<uint64_t>(rows.size(-1)) * rows.element_size();
}

// Returns rows aligned to 16 bytes.
inline at::Tensor readable(const at::Tensor& rows) {
  return reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % 16 == 0 ? rows : rows.clone();
}

}  // namespace ark::ops
