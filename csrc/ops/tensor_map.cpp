// Encodes a tensor map with the driver, in the layout that the fused matmul kernels expect: two-byte elements, 128-byte
// swizzle, and zeros outside of the matrix, so that edge tiles need no special case.
#include "ops/tensor_map.hpp"

#include <algorithm>

#include "cuda/driver.hpp"

namespace ark::ops {

device::TensorMap map_of(const void* data, int64_t length, int64_t lines, int64_t stride, int box_lines) {
  device::TensorMap made{};
  if (length == 0 || lines == 0) return made;  // nothing will be read
  CUtensorMap map;
  const uint64_t sizes[] = {static_cast<uint64_t>(length), static_cast<uint64_t>(lines)};
  const uint64_t strides[] = {static_cast<uint64_t>(stride) * 2};
  const uint32_t box[] = {device::MatmulShape::kDepth, static_cast<uint32_t>(box_lines)}, steps[] = {1, 1};
  ark::check(
      driver().tensor_map_encode_tiled(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, const_cast<void*>(data), sizes, strides,
                                       box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
      "cuTensorMapEncodeTiled");
  static_assert(sizeof(map) == sizeof(made));
  std::copy_n(map.opaque, 16, made.words);
  return made;
}

}  // namespace ark::ops
