// Questions about a stage that the scheduler, the passes and the emitters share. Their answers mirror how the kernels
// in ark_torch/kernels/cuda/loop choose among their variants.
#pragma once

#include <cstdint>
#include <vector>

#include "compiler/graph/stage.hpp"

namespace ark::compiler {

// Up to this many rows, a GPU's product computes each column on its own unless the matrix is large (matmul_tile.hpp).
inline constexpr int64_t kMatvecRows = 16;

// The attention that the stage is, or ends with; else nullptr.
const AttentionStage* attention_of(const Stage& stage);

// The value of the rows, if the stage's kernel handles a product's few rows and accesses rows and result element by
// element, at any address; else -1.
int few_rows_of(const Stage& stage);

// Whether the stage is a product of float8 rows with float8 weights.
bool multiplies_float8(const Stage& stage);

// Whether a GPU that has warp groups multiplies tiles of the product by them where they are aligned: half types,
// float8, and in TF32 what is contiguous along the depth.
bool multiplied_by_groups(const Graph& graph, const MatmulStage& product);

// Whether so few query rows share a KV head that a GPU's warps split the positions.
bool takes_few_rows(const Graph& graph, const AttentionStage& attention);

// Whether the stage is a collective that the loop kernel itself executes.
bool is_spread(const Stage& stage);

// The fused all_reduce whose packets are in each buffer, indexed by buffer.
std::vector<Push> pushed_buffers(const Graph& graph, const std::vector<Stage>& stages);

}  // namespace ark::compiler
