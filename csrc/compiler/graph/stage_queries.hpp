// What the scheduler, the passes and the emitters ask of a stage.
#pragma once

#include <cstdint>
#include <vector>

#include "compiler/graph/stage.hpp"

namespace ark::compiler {

// Products of so many rows compute every column by itself on a GPU (cuda/loop/matmul.cuh).
inline constexpr int64_t kMatvecRows = 16;

// The stage's attention, where it is one or ends with one; else nullptr.
const AttentionStage* attention_of(const Stage& stage);

// The rows' value where kernels for a product's few rows read it and write the result element by element, from and to
// anywhere; -1: the stage is none of these.
int few_rows_of(const Stage& stage);

// Whether a GPU computes the product in tiles of several rows.
bool multiplied_in_tiles(const MatmulStage& product);

// Whether the query rows that share a head of keys are so few that a GPU's warps share out positions.
bool takes_few_rows(const Graph& graph, const AttentionStage& attention);

// Whether the stage is a collective that the loop kernel itself carries out.
bool is_spread(const Stage& stage);

// By buffer: the all_reduce whose packets lie there.
std::vector<Push> pushed_buffers(const Graph& graph, const std::vector<Stage>& stages);

}  // namespace ark::compiler
