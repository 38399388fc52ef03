// Which of a GPU's kernels computes attention over many query rows, and how long a task takes.
#pragma once

#include <cstdint>
#include <string>

#include "compiler/graph/stage.hpp"

namespace ark::compiler {

enum class AttentionKernel : uint8_t {
  plain,   // attention.cuh chooses by types and rows: tiles of 64 rows, or others
  groups,  // attention_groups.cuh: 64 rows at a time, all positions at once
  flash,   // attention_flash.cuh: up to 256 rows at a time, over blocks of positions
};

// The kernel for this attention if the target has warp groups and operands are aligned.
AttentionKernel attention_kernel(const Graph& graph, const AttentionStage& attention);

// The estimated time on sm_90a of one KV head of the batch, with `rows` query rows over the heads that share it.
// `attended`: the share of the positions that they attend to.
double attention_task_us(const Graph& graph, const AttentionStage& attention, int64_t rows, double attended = 1);

}  // namespace ark::compiler
