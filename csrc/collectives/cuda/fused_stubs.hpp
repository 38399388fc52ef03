// Instantiations of the fused operators' kernels (ark_torch/kernels/cuda/fused), like stubs.hpp for collectives.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/cuda/stubs.hpp"
#include "cuda/fused/matmul.cuh"
#include "cuda/fused/moe_product.cuh"

namespace ark {

// The kernel shape for rows of a given size.
struct RowShape {
  uint32_t units, columns;  // accesses per row; groups of threads that share one
  int lanes;                // threads per group
  bool wide;                // 16-byte accesses, else one element each
  static RowShape of(uint64_t row_bytes, uint64_t element_bytes);
};

// Entry "embedding_bag"; bf16, f16 or f32.
std::string embedding_bag_stub(DType dtype, bool narrow_indices, bool wide, int lanes, bool weighted);
// Entries "send_gradient", "name_rows", "sum_rows" and "sum_crowded_rows".
std::string embedding_gradient_stub(DType dtype, bool narrow_indices, bool wide, int lanes, bool mean);

// Entry "moe_dispatch"; bf16, f16 or f32.
std::string moe_dispatch_stub(DType dtype, bool narrow_ids, bool wide);
// Entries "moe_scatter", "moe_gather" and "moe_settle".
std::string moe_rows_stub(DType dtype, bool wide);

// Entry "matmul", for Hopper; bf16 or f16.
std::string matmul_stub(DType dtype, device::MatmulShape shape, bool across, device::MatmulMode mode);
// Entry "moe_product", for Hopper; bf16 or f16.
std::string moe_product_stub(DType dtype, device::MatmulShape shape, bool gated, device::MoeActivation activation);
// The available tile shapes.
inline constexpr device::MatmulShape kMatmulShapes[] = {{128, 256}, {128, 128}, {64, 128}, {64, 64}};

std::vector<Stub> representative_fused_stubs();
std::vector<Stub> every_fused_stub();

}  // namespace ark
